"""GGUF files: versions 2 and 3, little endian, in one part or split into several.

Layout after the GGUF specification (`ggml/docs/gguf.md`): header, metadata, tensor table, then the
tensor data at a multiple of `general.alignment`. Every count, length, type and range is checked
against the file's size before it is used, so a broken or hostile file costs an error message and
no memory. Tensor data is mapped read-only and only read when asked for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.blocks import REMOVED_IDS, TYPES_BY_ID, dequantise
from engine.formats.checkpoint import FormatError, TensorInfo
from engine.formats.cursor import Cursor, looks_like, map_file

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME = 65535  # bytes of a key; the specification's limit, used for tensor names too

_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type id → struct letter
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 8: 8, 10: 8, 11: 8, 12: 8}
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True)
class _Part:
    """One mapped file, its metadata, and where each of its tensors lies in it."""

    path: Path
    data: npt.NDArray[np.uint8]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]  # from the start of the file


class GgufCheckpoint:
    """An opened GGUF model: metadata under GGUF's own keys, tensors mapped. See `Checkpoint`."""

    format = "gguf"

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self._parts = {name: part for part in parts for name in part.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: part.tensors[name] for name, part in self._parts.items()
        }
        self.tokenizer: Mapping[str, Any] | None = tokenizer_data(self.metadata)
        self.misaligned: tuple[str, ...] = tuple(
            name for name, part in self._parts.items() if part.offsets[name] % DEFAULT_ALIGNMENT
        )

    @staticmethod
    def open(path: Path | str) -> GgufCheckpoint:
        """Opens a file, or all parts of a split model when given any one of them.

        Raises FormatError naming file, field and offset.
        """
        path = Path(path)
        return GgufCheckpoint(path, _read_parts(path))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """(rows, bytes per row), mapped; copied to aligned memory if the file misaligns it."""
        info = self._info(name)
        part = self._parts[name]
        start = part.offsets[name]
        rows = math.prod(info.shape[:-1])
        found = part.data[start : start + info.nbytes].reshape(rows, -1)
        return found.copy() if name in self.misaligned else found

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        info = self._info(name)
        return dequantise(self.raw(name), info.type, info.shape[-1]).reshape(info.shape)

    def close(self) -> None:
        """Forgets the mappings; each is unmapped when the last array that uses it is gone."""
        self._parts = {}

    def _info(self, name: str) -> TensorInfo:
        if name not in self._parts:
            if name in self.tensors:
                raise FormatError(f"{self.path}: tensor {name!r} asked for after close")
            raise FormatError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]


def _read_parts(path: Path) -> list[_Part]:
    match = _SPLIT_NAME.match(path.name)
    count = int(match["count"]) if match else 1
    if match is None or count <= 1:
        part = _read_part(path)
        declared = part.metadata.get("split.count", 1)
        if isinstance(declared, int) and declared > 1:
            raise FormatError(
                f"{path}: is part {part.metadata.get('split.no')} of {declared} (split.count), but "
                "its name does not say so; keep the names `NAME-00001-of-0000N.gguf` and put all "
                "parts into one folder"
            )
        return [part]
    paths = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    for number, part_path in enumerate(paths, 1):
        if not part_path.is_file():
            raise FormatError(f"{part_path}: part {number} of {count} is missing; fetch it")
    parts: list[_Part] = []
    names: dict[str, Path] = {}
    for number, part_path in enumerate(paths):
        part = _read_part(part_path)
        for key, expected in (("split.no", number), ("split.count", count)):
            found = part.metadata.get(key)
            if found != expected:
                raise FormatError(
                    f"{part_path}: {key} is {found!r}, the file's name says {expected}; "
                    "a part was renamed or belongs to another model"
                )
        for name in part.tensors:
            if name in names:
                raise FormatError(f"{part_path}: tensor {name!r} is already in {names[name]}")
            names[name] = part_path
        parts.append(part)
    total = parts[0].metadata.get("split.tensors.count")
    if total is not None and total != len(names):
        raise FormatError(
            f"{paths[0]}: split.tensors.count is {total!r}, the parts hold {len(names)} tensors"
        )
    return parts


def _read_part(path: Path) -> _Part:
    data, mapping = map_file(path)
    cursor = Cursor(mapping, path)
    tensor_count, kv_count = _header(cursor)
    metadata = dict(_metadata(cursor, kv_count))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise FormatError(
            f"{path}: general.alignment is {alignment!r}, expected a power of two "
            f"from 1 to {MAX_ALIGNMENT}"
        )
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for info, offset in _tensor_table(cursor, tensor_count):
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name!r}", "is listed twice")
        tensors[info.name], offsets[info.name] = info, offset
    start = -(-cursor.at // alignment) * alignment
    offsets = {name: start + offset for name, offset in offsets.items()}
    _check_ranges(path, tensors, offsets, len(data))
    return _Part(path, data, metadata, tensors, offsets)


def _header(cursor: Cursor) -> tuple[int, int]:
    """The tensor count and the metadata count, both possible for a file of this size."""
    head = cursor.take(min(64, cursor.size), "header")
    cursor.at = 0
    if head[:4] != MAGIC:
        kind = looks_like(head)
        if head[:4] == MAGIC[::-1]:
            kind = "is a GGUF file of a big-endian machine; convert it to little endian"
        raise FormatError(
            f"{cursor.path}: {kind or 'is not a GGUF file'} "
            f"(found {head[:4]!r} at offset 0, expected {MAGIC!r})"
        )
    cursor.at = 4
    version = cursor.whole("I", "version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise cursor.fail("version", "the file is big endian, little endian expected", at=4)
        raise cursor.fail("version", f"is {version}, versions 2 and 3 are read", at=4)
    tensor_count = cursor.whole("Q", "tensor count")
    kv_count = cursor.whole("Q", "metadata count")
    # The smallest entries there can be: a tensor of one dimension with an empty name; a byte value
    # under an empty key.
    for count, smallest, field in (
        (tensor_count, 8 + 4 + 8 + 4 + 8, "tensor count"),
        (kv_count, 8 + 4 + 1, "metadata count"),
    ):
        if count * smallest > cursor.left:
            raise FormatError(
                f"{cursor.path}: {field} at offset {8 if field[0] == 't' else 16}: {count} entries "
                f"cannot fit in the {cursor.left} bytes that follow; truncated or corrupt"
            )
    return tensor_count, kv_count


def _metadata(cursor: Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for index in range(count):
        start = cursor.at
        key = cursor.string(f"key of metadata {index}", limit=MAX_NAME)
        if not key or key in seen:
            fault = "occurs twice" if key else "is empty"
            raise cursor.fail(f"metadata {index}", f"its key {key!r} {fault}", at=start)
        seen.add(key)
        kind = cursor.whole("I", f"value type of {key}")
        yield key, _value(cursor, kind, key)


def _value(cursor: Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string(key)
    if kind == _BOOL:
        value = cursor.whole("B", key)
        if value > 1:
            raise cursor.fail(key, f"a bool is {value}, 0 or 1 expected", at=cursor.at - 1)
        return bool(value)
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], key)
    if kind != _ARRAY:
        raise cursor.fail(key, f"value type {kind} is unknown, 0 to 12 expected", at=cursor.at - 4)
    start = cursor.at
    item = cursor.whole("I", f"item type of {key}")
    length = cursor.whole("Q", f"length of {key}")
    if item not in _WIDTHS:
        found = "arrays of arrays" if item == _ARRAY else f"item type {item}"
        raise cursor.fail(key, f"{found}: expected items of a plain type", at=start)
    cursor.need(length * _WIDTHS[item], f"{key} ({length} items)")
    if item == _STRING:
        return [cursor.string(f"{key}[{index}]") for index in range(length)]
    raw = cursor.take(length * _WIDTHS[item], key)
    if item == _BOOL:
        if raw and max(raw) > 1:
            raise cursor.fail(key, f"a bool is {max(raw)}, 0 or 1 expected", at=start)
        return [bool(value) for value in raw]
    return np.frombuffer(raw, np.dtype("<" + _SCALARS[item])).tolist()


def _tensor_table(cursor: Cursor, count: int) -> Iterator[tuple[TensorInfo, int]]:
    """Each tensor and its offset in the data section; not yet checked against the file's end."""
    for index in range(count):
        start = cursor.at
        name = cursor.string(f"name of tensor {index}", limit=MAX_NAME)
        field = f"tensor {name!r}"
        n_dims = cursor.whole("I", f"n_dims of {field}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise cursor.fail(
                f"n_dims of {field}", f"is {n_dims}, 1 to {MAX_DIMS} expected", at=cursor.at - 4
            )
        dims = [cursor.whole("Q", f"dimension {axis} of {field}") for axis in range(n_dims)]
        if 0 in dims:
            raise cursor.fail(field, f"has a zero dimension: {dims}", at=start)
        kind = cursor.whole("I", f"type of {field}")
        block = TYPES_BY_ID.get(kind)
        if block is None:
            gone = REMOVED_IDS.get(kind)
            found = f"{kind} ({gone}, removed from ggml)" if gone else f"{kind}, which is unknown"
            raise cursor.fail(f"type of {field}", f"is {found}; convert it again", at=cursor.at - 4)
        if dims[0] % block.elements:
            raise cursor.fail(
                field,
                f"{block.name} rows are whole blocks of {block.elements}, found {dims[0]} columns",
                at=start,
            )
        offset = cursor.whole("Q", f"offset of {field}")
        nbytes = math.prod(dims) // block.elements * block.nbytes
        yield TensorInfo(name, tuple(reversed(dims)), block.name, nbytes), offset


def _check_ranges(
    path: Path, tensors: Mapping[str, TensorInfo], offsets: Mapping[str, int], size: int
) -> None:
    """Raises FormatError for a tensor that ends past the file or overlaps another."""
    previous, end = "", 0
    for name in sorted(tensors, key=lambda name: offsets[name]):
        info, start = tensors[name], offsets[name]
        if start + info.nbytes > size:
            raise FormatError(
                f"{path}: tensor {name!r} ({info.type} {info.shape}) takes bytes {start} to "
                f"{start + info.nbytes}, the file ends at {size}: "
                f"{start + info.nbytes - size} bytes are missing; fetch it again"
            )
        if previous and start < end:
            raise FormatError(
                f"{path}: tensor {name!r} at offset {start} overlaps {previous!r}, "
                f"which ends at {end}; the file is corrupt"
            )
        previous, end = name, start + info.nbytes


def tokenizer_data(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `engine.tokenizer.Tokenizer` takes, from `tokenizer.ggml.*`; None when there is none."""
    prefix = "tokenizer.ggml."
    kind = metadata.get(prefix + "model")
    if kind in (None, "none", "no_vocab"):
        return None
    data: dict[str, Any] = {"kind": kind}
    for name, key in (
        ("pre", "pre"),
        ("tokens", "tokens"),
        ("token_types", "token_type"),
        ("scores", "scores"),
        ("merges", "merges"),
        ("bos_id", "bos_token_id"),
        ("eos_id", "eos_token_id"),
        ("eot_id", "eot_token_id"),
        ("eom_id", "eom_token_id"),
        ("unk_id", "unknown_token_id"),
        ("pad_id", "padding_token_id"),
        ("add_bos", "add_bos_token"),
        ("add_eos", "add_eos_token"),
        ("add_space_prefix", "add_space_prefix"),
    ):
        if prefix + key in metadata:
            data[name] = metadata[prefix + key]
    if "tokenizer.chat_template" in metadata:
        data["chat_template"] = metadata["tokenizer.chat_template"]
    return data


def is_gguf(head: bytes) -> bool:
    """Whether a file that begins like this claims to be GGUF."""
    return head[:4] in (MAGIC, MAGIC[::-1])


__all__ = ["FormatError", "GgufCheckpoint", "is_gguf", "tokenizer_data"]
