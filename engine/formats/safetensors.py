"""safetensors models: one file or several behind an index, with `config.json` beside them.

The format (https://github.com/huggingface/safetensors, "Format"): a little-endian u64 header
length, a JSON header that names each tensor's dtype, shape and byte range, then the data. Ranges
must cover the data without holes or overlaps; all of it is checked before anything is mapped or
read. Dtypes are handed on under their ggml names, so that BF16, F16 and F32 mean the same in all
formats.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.blocks import TYPES, dequantise
from engine.formats.checkpoint import FormatError, TensorInfo
from engine.formats.cursor import Cursor, looks_like, map_file

MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit
MAX_TEXT_FILE = 256 << 20  # bytes; config.json, tokenizer.json and the index stay far below
INDEX = "model.safetensors.index.json"

# dtypes that hold model weights; the others (BOOL, U8, F8_E4M3, ...) are refused by name when read
_TYPES = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "F64": "F64",
    "I8": "I8",
    "I16": "I16",
    "I32": "I32",
    "I64": "I64",
}
_OTHER_WIDTHS = {
    "BOOL": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "C64": 8,
}


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One mapped file: its tensors and where each begins, from the start of the file."""

    path: Path
    data: npt.NDArray[np.uint8]
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]


class SafetensorsCheckpoint:
    """An opened safetensors model; `metadata` holds the keys of `config.json`. See `Checkpoint`."""

    format = "safetensors"

    def __init__(self, path: Path, shards: list[_Shard], folder: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = _read_json(folder / "config.json") or {}
        self._shards = {name: shard for shard in shards for name in shard.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: shard.tensors[name] for name, shard in self._shards.items()
        }
        self.tokenizer: Mapping[str, Any] | None = _tokenizer_data(folder)

    @staticmethod
    def open(path: Path | str) -> SafetensorsCheckpoint:
        """Opens a `.safetensors` file, or a folder with `model.safetensors` or its index.

        Raises FormatError naming file, field and offset.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        if not path.is_dir():
            return SafetensorsCheckpoint(path, [_read_shard(path)], folder)
        if (folder / INDEX).exists():
            return SafetensorsCheckpoint(path, _read_indexed(folder), folder)
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files[:5]) or "none"
            raise FormatError(
                f"{folder}: expected {INDEX} or one .safetensors file, found {names}; fetch the "
                "index, or name one file"
            )
        return SafetensorsCheckpoint(path, [_read_shard(files[0])], folder)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """(rows, bytes per row), mapped; copied to aligned memory if the file misaligns it."""
        info = self._info(name)
        shard = self._shards[name]
        start = shard.offsets[name]
        found = shard.data[start : start + info.nbytes].reshape(math.prod(info.shape[:-1]), -1)
        return found.copy() if start % 32 else found

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        info = self._info(name)
        if info.type not in TYPES:
            raise FormatError(
                f"{self.path}: tensor {name!r} is {info.type}; read are {sorted(_TYPES)}"
            )
        return dequantise(self.raw(name), info.type, info.shape[-1]).reshape(info.shape)

    def close(self) -> None:
        """Forgets the mappings; each is unmapped when the last array that uses it is gone."""
        self._shards = {}

    def _info(self, name: str) -> TensorInfo:
        if name not in self._shards:
            if name in self.tensors:
                raise FormatError(f"{self.path}: tensor {name!r} asked for after close")
            raise FormatError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins like this (16 bytes or more) has a safetensors header."""
    return len(head) > 8 and int.from_bytes(head[:8], "little") <= MAX_HEADER and head[8:9] == b"{"


def _read_indexed(folder: Path) -> list[_Shard]:
    index = folder / INDEX
    weight_map = (_read_json(index) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: weight_map is missing or empty; fetch the index again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise FormatError(
                f"{index}: weight_map[{name!r}] is {file!r}, expected the name of a file beside it"
            )
    shards: list[_Shard] = []
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise FormatError(f"{folder / file}: the index names this file, it is missing")
        shards.append(_read_shard(folder / file))
    for shard in shards:
        for name in shard.tensors:
            expected = weight_map.get(name)
            if expected != shard.path.name:
                raise FormatError(
                    f"{shard.path}: holds tensor {name!r}, which the index places in {expected!r}"
                )
    held = {name for shard in shards for name in shard.tensors}
    missing = sorted(set(weight_map) - held)
    if missing:
        raise FormatError(
            f"{folder / weight_map[missing[0]]}: tensor {missing[0]!r} is missing, "
            "the index places it there"
        )
    return shards


def _read_shard(path: Path) -> _Shard:
    data, mapping = map_file(path)
    cursor = Cursor(mapping, path)
    head = bytes(data[:64])
    if not is_safetensors(head):
        length = int.from_bytes(head[:8], "little")
        kind = looks_like(head) or (
            f"header length at offset 0 is {length}, at most {MAX_HEADER} expected"
            if length > MAX_HEADER or len(head) <= 8
            else f"found {head[8:9]!r} at offset 8, a JSON header expected"
        )
        raise FormatError(f"{path}: is no safetensors file: {kind}")
    length = cursor.whole("Q", "header length")
    try:
        header = json.loads(cursor.take(length, "header"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: header at offset 8 is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: header at offset 8 is {type(header).__name__}, not an object")
    start = cursor.at
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name], begin = _entry(path, name, entry)
            offsets[name] = start + begin
    _check_coverage(path, tensors, offsets, start, len(data))
    return _Shard(path, data, tensors, offsets)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is named twice")
    return found


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """A tensor and where it begins in the data, from its header entry; sizes must agree."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: its entry is {type(entry).__name__}, not an object")
    dtype, shape, ends = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise FormatError(f"{where}: shape is {shape!r}, expected positive whole numbers")
    if not isinstance(ends, list) or len(ends) != 2 or not all(type(end) is int for end in ends):
        raise FormatError(f"{where}: data_offsets is {ends!r}, expected [begin, end]")
    if isinstance(dtype, str) and dtype in _TYPES:
        width = TYPES[_TYPES[dtype]].nbytes
    elif isinstance(dtype, str) and dtype in _OTHER_WIDTHS:
        width = _OTHER_WIDTHS[dtype]
    else:
        raise FormatError(f"{where}: dtype {dtype!r} is unknown, known: {sorted(_TYPES)}")
    begin, end = ends
    nbytes = math.prod(shape) * width
    if begin < 0 or end - begin != nbytes:
        raise FormatError(
            f"{where}: data_offsets {ends} span {end - begin} bytes, {dtype} {shape} takes {nbytes}"
        )
    # A scalar becomes one row of one value, so that every tensor has rows.
    return TensorInfo(name, tuple(shape) or (1,), dtype, nbytes), begin


def _check_coverage(
    path: Path, tensors: Mapping[str, TensorInfo], offsets: Mapping[str, int], start: int, size: int
) -> None:
    """Raises FormatError unless the tensors fill the file's data exactly."""
    end = start
    for name in sorted(tensors, key=lambda name: offsets[name]):
        begin, nbytes = offsets[name], tensors[name].nbytes
        if begin != end:
            fault = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            raise FormatError(f"{path}: tensor {name!r} at offset {begin} {fault}, at {end}")
        end = begin + nbytes
        if end > size:
            raise FormatError(
                f"{path}: tensor {name!r} takes bytes {begin} to {end}, the file ends at {size}: "
                f"{end - size} bytes are missing; fetch it again"
            )
    if end != size:
        raise FormatError(
            f"{path}: {size - end} bytes follow the last tensor, which ends at {end}; "
            "the file is corrupt"
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file beside the model; None when there is no such file."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_TEXT_FILE:
            raise FormatError(f"{path}: {path.stat().st_size} bytes, at most {MAX_TEXT_FILE} read")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: found {type(found).__name__}, expected a JSON object")
    return found


def _tokenizer_data(folder: Path) -> dict[str, Any] | None:
    """What `engine.tokenizer.Tokenizer` takes, from tokenizer.json and the files beside it."""
    raw = _read_json(folder / "tokenizer.json")
    if raw is None:
        return None
    config = _read_json(folder / "tokenizer_config.json") or {}
    keep = ("bos_token", "eos_token", "chat_template")
    data: dict[str, Any] = {
        "kind": "huggingface",
        "tokenizer_json": raw,
        "config": {key: config[key] for key in keep if key in config},
    }
    template = folder / "chat_template.jinja"
    if template.is_file() and template.stat().st_size <= MAX_TEXT_FILE:
        data["chat_template"] = template.read_text("utf-8", errors="replace")
    stops = (_read_json(folder / "generation_config.json") or {}).get("eos_token_id")
    if stops is not None:
        data["stop_ids"] = stops if isinstance(stops, list) else [stops]
    return data
