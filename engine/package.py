"""The package: one file with everything a board needs of a model, mapped read-only.

    magic "DECODPK2" | u64 length of the header | header (JSON)
    | tensors, each part 64-byte aligned | tokenizer (JSON)

The header holds the hyper-parameters, the scheme, layout, group and parts (dtype, shape, offset) of
every tensor, where the tokenizer lies, and the file's size, so that a cut file is refused before
anything is mapped. Offsets count from the start of the file. Integers are little-endian.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.architectures import Hyperparameters, ModelLayout, family_of
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.quantize.repack import Repacked, repack
from engine.quantize.schemes import BITS, LAYOUTS, PackedTensor, part_forms

MAGIC = b"DECODPK2"
ALIGNMENT = 64
MAX_HEADER = 256 << 20  # bytes; a vocabulary of a million tokens stays far below
DTYPES: Mapping[str, type[np.generic]] = {
    "f8": np.float64,
    "f4": np.float32,
    "f2": np.float16,
    "u2": np.uint16,
    "i1": np.int8,
    "u1": np.uint8,
}


class PackageError(ValueError):
    """A package that cannot be read: names the file and the field."""


@dataclasses.dataclass(frozen=True)
class PackageInfo:
    """What `build_package` made. `sha256` is of the whole file."""

    path: Path
    sha256: str
    bytes: int
    name: str
    scheme: str
    notes: tuple[str, ...]
    hyperparameters: Hyperparameters


class Package:
    """An opened package. Its arrays are views of the mapping; nothing is copied to the heap."""

    def __init__(self, path: Path, header: Mapping[str, Any], mapping: mmap.mmap) -> None:
        self.path, self._mapping = path, mapping
        try:
            self.name = str(header["name"])
            self.scheme = str(header["scheme"])
            self.layout = str(header["layout"])
            self.notes = tuple(str(note) for note in header["notes"])
            self.hyperparameters = Hyperparameters.from_json(header["hyperparameters"])
            self._tokenizer = (
                int(header["tokenizer"]["offset"]),
                int(header["tokenizer"]["bytes"]),
            )
            self.tensors: Mapping[str, PackedTensor] = {
                name: self._tensor(name, spec) for name, spec in header["tensors"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise PackageError(f"{path}: header field {error} is missing or malformed") from error
        except ValueError as error:
            raise PackageError(f"{path}: {error}") from error

    @staticmethod
    def open(path: Path | str) -> Package:
        """Raises PackageError for a file that is missing, cut, of another version or damaged."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = _read_header(path, file.read(len(MAGIC) + 8), file.read, path.stat())
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise PackageError(f"{path}: cannot be opened: {error.strerror}") from error
        return Package(path, header, mapping)

    def _tensor(self, name: str, spec: Mapping[str, Any]) -> PackedTensor:
        scheme, layout = str(spec["scheme"]), str(spec["layout"])
        shape, group = tuple(int(n) for n in spec["shape"]), int(spec["group"])
        try:
            forms = part_forms(scheme, layout, shape, group)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
        needed = {part for part, form in forms.items() if not form.optional}
        found = set(spec["parts"])
        if not needed <= found <= set(forms):
            raise ValueError(f"tensor {name!r}: parts {sorted(found)}, expected {sorted(needed)}")
        parts = {part: self._view(name, part, at) for part, at in spec["parts"].items()}
        for part, array in parts.items():
            form = forms[part]
            if array.shape != form.shape or array.dtype not in form.dtypes:
                expected = " or ".join(str(np.dtype(dtype)) for dtype in form.dtypes)
                raise ValueError(
                    f"tensor {name!r}: part {part!r} is {array.dtype} {array.shape}, expected "
                    f"{expected} {form.shape} for scheme {scheme}, layout {layout}, group {group}"
                )
        return PackedTensor(name, scheme, shape, parts, int(spec["zero"]), layout, group)

    def _view(self, name: str, part: str, spec: Mapping[str, Any]) -> npt.NDArray[np.generic]:
        dtype = np.dtype(DTYPES[spec["dtype"]])
        shape = tuple(int(n) for n in spec["shape"])
        offset = int(spec["offset"])
        count = 1
        for n in shape:
            count *= n
        end = offset + count * dtype.itemsize
        if min(shape, default=1) < 1 or offset < 0 or end > len(self._mapping):
            raise ValueError(
                f"tensor {name!r}: part {part!r} lies at {offset}..{end}, "
                f"the file has {len(self._mapping)} bytes"
            )
        if offset % ALIGNMENT:
            raise ValueError(f"tensor {name!r}: part {part!r} at {offset} is not 64-byte aligned")
        flat = np.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)
        return flat.reshape(shape)

    @functools.cached_property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """What engine.tokenizer.Tokenizer takes. Parsed on first use: boards work on token ids."""
        offset, size = self._tokenizer
        if offset < 0 or size < 0 or offset + size > len(self._mapping):
            raise PackageError(
                f"{self.path}: tokenizer at {offset}, {size} bytes: outside the file"
            )
        try:
            found = json.loads(self._mapping[offset : offset + size])
        except ValueError as error:
            raise PackageError(f"{self.path}: tokenizer is not JSON: {error}") from error
        if found is not None and not isinstance(found, dict):
            raise PackageError(f"{self.path}: tokenizer is {type(found).__name__}, not an object")
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all tensors, an untied embedding excepted."""
        tied = self.hyperparameters.tied
        return sum(t.nbytes for name, t in self.tensors.items() if tied or name != "embed")

    def close(self) -> None:
        """Drops the views; the mapping ends when the last array that was handed out does."""
        self.tensors = {}
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(
    path: Path, start: bytes, read: Callable[[int], bytes], stat: os.stat_result
) -> Mapping[str, Any]:
    if len(start) < len(MAGIC) + 8 or start[: len(MAGIC)] != MAGIC:
        raise PackageError(
            f"{path}: begins with {start[:8]!r}, expected {MAGIC!r}; is it a package? "
            "`engine pack MODEL PACKAGE` makes one"
        )
    (length,) = struct.unpack("<Q", start[len(MAGIC) :])
    if length > min(MAX_HEADER, stat.st_size):
        raise PackageError(f"{path}: header of {length} bytes in a file of {stat.st_size}")
    try:
        header = json.loads(read(length))
    except ValueError as error:
        raise PackageError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("bytes") != stat.st_size:
        found = header.get("bytes") if isinstance(header, dict) else None
        raise PackageError(
            f"{path}: file has {stat.st_size} bytes, its header says {found}; copy it again"
        )
    return header


def build_package(
    checkpoint: Checkpoint,
    path: Path,
    *,
    name: str,
    layout: str = "blocked",
    progress: Callable[[int, int], None] | None = None,
) -> PackageInfo:
    """Write `checkpoint` as a package; `progress(done, total)` counts tensors.

    `layout` is that of its quantised tensors (engine.quantize.schemes).
    The file appears under its name only when it is whole. Raises FormatError for a checkpoint that
    is incomplete, of an unknown architecture or not finite, ValueError for a layout that does not
    exist, OSError for the disk.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    model = _layout(checkpoint)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            digest, header = _write(checkpoint, model, name, layout, file, progress)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return PackageInfo(
        path,
        digest,
        header["bytes"],
        name,
        header["scheme"],
        tuple(header["notes"]),
        model.hyperparameters,
    )


def _layout(checkpoint: Checkpoint) -> ModelLayout:
    try:
        return family_of(checkpoint).read(checkpoint)
    except FormatError:
        raise
    except ValueError as error:  # numbers that make no model or no RoPE
        raise FormatError(f"{checkpoint.path}: {error}") from error


def _write(
    checkpoint: Checkpoint,
    model: ModelLayout,
    name: str,
    layout: str,
    file: Any,
    progress: Callable[[int, int], None] | None,
) -> tuple[str, dict[str, Any]]:
    """Two passes over the tensors, so that one tensor at a time is in memory: the offsets, then
    the bytes."""
    total = 2 * (len(model.sources) + 1)
    done = 0

    def repacked() -> Iterator[tuple[str, tuple[int, ...], Repacked]]:
        nonlocal done
        for target, source in model.sources.items():
            order = _row_order(model, target)
            yield (
                target,
                checkpoint.tensors[source].shape,
                repack(checkpoint, source, order, layout),
            )
            done += 1
            if progress:
                progress(done, total)
        frequencies = model.inverse_frequencies
        yield "rope.inv_freq", frequencies.shape, Repacked("f64", {"data": frequencies})
        done += 1

    specs: dict[str, Any] = {}
    notes = list(model.notes)
    kinds: dict[str, int] = {}
    cursor = 0  # from the start of the data
    for target, shape, tensor in repacked():
        parts = {}
        for part, array in tensor.parts.items():
            dtype = array.dtype.str[1:]
            parts[part] = {"dtype": dtype, "shape": list(array.shape), "offset": cursor}
            cursor += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        specs[target] = {
            "scheme": tensor.scheme,
            "shape": shape,
            "layout": tensor.layout,
            "group": tensor.group,
            "zero": tensor.zero,
            "parts": parts,
        }
        kinds[tensor.scheme] = kinds.get(tensor.scheme, 0) + int(np.prod(shape))
        if tensor.note:
            notes.append(tensor.note)
    tokenizer = json.dumps(checkpoint.tokenizer, separators=(",", ":")).encode()
    header = {
        "name": name,
        "scheme": _scheme_name(kinds),
        "layout": layout,
        "notes": notes,
        "hyperparameters": model.hyperparameters.to_json(),
        "tokenizer": {"offset": cursor, "bytes": len(tokenizer)},
        "tensors": specs,
        "bytes": 0,
    }
    start = _place(header, specs, cursor)
    digest = hashlib.sha256()

    def put(data: Any) -> None:
        file.write(data)
        digest.update(data)

    text = json.dumps(header, separators=(",", ":")).encode()
    put(MAGIC + struct.pack("<Q", len(text)) + text)
    put(bytes(start - len(MAGIC) - 8 - len(text)))
    for _, _, tensor in repacked():
        for array in tensor.parts.values():
            put(np.ascontiguousarray(array).data.cast("B"))
            put(bytes(-array.nbytes % ALIGNMENT))
    put(tokenizer)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest(), header


def _place(header: dict[str, Any], specs: Mapping[str, Any], data_bytes: int) -> int:
    """Make offsets absolute and set the file's size; returns where the data start.

    The offsets' own digits change the header's length, so room is kept for the longest.
    """
    offsets = [part for spec in specs.values() for part in spec["parts"].values()]
    offsets.append(header["tokenizer"])
    room = len(json.dumps(header, separators=(",", ":")).encode()) + 20 * (len(offsets) + 1)
    start = -(-(len(MAGIC) + 8 + room) // ALIGNMENT) * ALIGNMENT
    for part in offsets:
        part["offset"] += start
    header["bytes"] = start + data_bytes + header["tokenizer"]["bytes"]
    return start


def _scheme_name(kinds: Mapping[str, int]) -> str:
    """For people: the scheme that most weights have, with the others behind it."""
    names = {"q4": "W4", "q8": "W8", "q4k": "Q4_K", "q5k": "Q5_K", "q6k": "Q6_K"}
    order = sorted((k for k in kinds if k in BITS), key=lambda kind: -kinds[kind])
    shares = [
        names.get(kind, kind.upper()) for kind in order if kinds[kind] * 100 >= sum(kinds.values())
    ]
    return "+".join(shares)


def _row_order(layout: ModelLayout, target: str) -> npt.NDArray[np.int64] | None:
    """Rows of q and k from neighbours-rotated (2i, 2i+1) to halves-rotated (i, i + D/2) order."""
    hp = layout.hyperparameters
    part = target.split(".", 1)[-1]
    if not layout.unpermute_qk or part.split(".bias")[0] not in ("attn.q", "attn.k"):
        return None
    heads = hp.heads if part.startswith("attn.q") else hp.kv_heads
    order = np.arange(heads * hp.head_dim, dtype=np.int64)
    return order.reshape(heads, hp.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
