"""Arrays that a board sent, read without trust: no pickle, nothing larger than its file says.

`numpy.load` believes an archive: a member of some kilobytes may unpack to terabytes, and the
header of an array may announce a shape that takes all memory before a byte of it was read. Here
every size is compared first. Format: numpy.lib.format, versions 1.0 and 2.0, in a zip archive.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from harness.errors import HarnessError

if TYPE_CHECKING:
    import numpy.typing as npt

BYTES_LIMIT = 1 << 30  # of all arrays of a file, unpacked
MEMBERS_LIMIT = 10_000
_HEADER_BYTES = 10_000  # as numpy's own limit
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name. Raises HarnessError for anything that is not one."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(item.file_size for item in members)
            if len(members) > MEMBERS_LIMIT or size > BYTES_LIMIT:
                raise ValueError(
                    f"{len(members)} arrays of {size} bytes, at most {MEMBERS_LIMIT} of "
                    f"{BYTES_LIMIT}"
                )
            found = {}
            for item in members:
                with archive.open(item) as file:
                    found[item.filename.removesuffix(".npy")] = _array(file, item.file_size)
            return found
    except Exception as error:  # numpy's and zipfile's parsers raise nearly anything on garbage
        raise HarnessError(
            f"no arrays that can be read: {error or type(error).__name__}",
            where=str(path),
            expected="an .npz file of plain numbers, as the engine writes them",
            remedy="run the stage again; if it stays, suspect the board's storage",
        ) from error


def _array(file: IO[bytes], size: int) -> npt.NDArray[Any]:
    """One array of a member that unpacks to `size` bytes. Raises ValueError and what numpy does."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"array format {version}, expected one of {sorted(_HEADERS)}")
    shape, fortran, dtype = _HEADERS[version](file, max_header_size=_HEADER_BYTES)
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"elements of type {dtype}, expected plain numbers or text")
    if any(side < 0 for side in shape):
        raise ValueError(f"an array of shape {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != size - file.tell():
        raise ValueError(f"an array of {wanted} bytes in {size - file.tell()}")
    data = bytearray(file.read(wanted))
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes of an array of {wanted}")
    return np.ndarray(shape, dtype=dtype, buffer=data, order="F" if fortran else "C")
