"""ggml's tensor types: how many bytes a block takes, and how it becomes float32.

Sizes and layouts follow ggml (`ggml/src/ggml-common.h`, the `block_*` structs; the ids are those of
`enum ggml_type` in `ggml/include/ggml.h`). The types that a board must read with numpy alone are
decoded here; every other type goes through the `gguf` library, which only the lab host has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from engine.formats.checkpoint import FormatError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class BlockType:
    """`elements` values of a row take `nbytes` bytes; a row is a whole number of blocks."""

    name: str
    id: int
    elements: int
    nbytes: int


_TABLE = (
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 18),
    ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),
    ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34),
    ("Q8_1", 9, 32, 36),
    ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),
    ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210),
    ("Q8_K", 15, 256, 292),
    ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98),
    ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18),
    ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82),
    ("IQ4_XS", 23, 256, 136),
    ("I8", 24, 1, 1),
    ("I16", 25, 1, 2),
    ("I32", 26, 1, 4),
    ("I64", 27, 1, 8),
    ("F64", 28, 1, 8),
    ("IQ1_M", 29, 256, 56),
    ("BF16", 30, 1, 2),
    ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),
    ("MXFP4", 39, 32, 17),
    ("NVFP4", 40, 64, 36),
    ("Q1_0", 41, 128, 18),
)

TYPES: Mapping[str, BlockType] = {row[0]: BlockType(*row) for row in _TABLE}
TYPES_BY_ID: Mapping[int, BlockType] = {block.id: block for block in TYPES.values()}

# Ids that ggml once gave out and took back; files that hold them must be converted again.
REMOVED_IDS: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# Rows are decoded in pieces of about this many values, so that temporaries stay small beside the
# result.
_PIECE = 1 << 22


def dequantise(raw: Bytes, type_name: str, columns: int) -> Floats:
    """Float32 values of rows of blocks: (rows, bytes per row) uint8 → (rows, columns) float32.

    Raises FormatError for a type without a decoder here, and for rows of the wrong size.
    """
    block = TYPES.get(type_name)
    if block is None:
        raise FormatError(f"tensor type {type_name!r} is unknown, known: {sorted(TYPES)}")
    if raw.ndim != 2 or raw.shape[1] * block.elements != columns * block.nbytes:
        raise FormatError(
            f"{type_name} rows of {columns} values take "
            f"{columns // block.elements * block.nbytes} bytes, found an array {raw.shape}"
        )
    decode = _DECODERS.get(type_name)
    if decode is None:
        return _dequantise_with_library(raw, block, columns)
    out = np.empty((raw.shape[0], columns), np.float32)
    step = max(1, _PIECE // max(1, columns))
    for start in range(0, raw.shape[0], step):
        rows = np.ascontiguousarray(raw[start : start + step])
        out[start : start + step] = decode(rows).reshape(-1, columns)
    return out


def _dequantise_with_library(raw: Bytes, block: BlockType, columns: int) -> Floats:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise FormatError(
            f"{block.name} tensors are decoded by the `gguf` library, which is not installed here; "
            f"read natively: {sorted(_DECODERS)}; `pip install gguf`, or pack the model on the host"
        ) from error
    out = np.empty((raw.shape[0], columns), np.float32)
    step = max(1, _PIECE // max(1, columns))
    try:
        for start in range(0, raw.shape[0], step):
            rows = np.ascontiguousarray(raw[start : start + step])
            out[start : start + step] = dequantize(rows, GGMLQuantizationType(block.id))
    except (NotImplementedError, ValueError) as error:
        raise FormatError(
            f"{block.name} has no decoder in the installed `gguf` library ({error}); "
            "update it, or convert the model to another type"
        ) from error
    return out


def _plain(dtype: str) -> Callable[[Bytes], Floats]:
    def decode(rows: Bytes) -> Floats:
        return rows.view(np.dtype(dtype)).astype(np.float32)

    return decode


def bf16_to_float32(rows: Bytes) -> Floats:
    """BF16 is the upper half of a float32: (rows, 2 * n) uint8 → (rows, n)."""
    return (rows.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of each block, as float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> npt.NDArray[np.uint8]:
    """(n, 16) bytes → (n, 32): all low halves first, then all high halves."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> npt.NDArray[np.uint8]:
    """The 32-bit mask at byte `at`, bit j of it being bit 4 of value j → (n, 32) of 0 or 16."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(rows: Bytes) -> Floats:
    blocks = rows.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * values.astype(np.float32)


def _q4_1(rows: Bytes) -> Floats:
    blocks = rows.reshape(-1, 20)
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(rows: Bytes) -> Floats:
    blocks = rows.reshape(-1, 22)
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16)
    return _half(blocks, 0) * values.astype(np.float32)


def _q5_1(rows: Bytes) -> Floats:
    blocks = rows.reshape(-1, 24)
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(rows: Bytes) -> Floats:
    blocks = rows.reshape(-1, 34)
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


_DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "F64": _plain("<f8"),
    "I8": _plain("<i1"),
    "I16": _plain("<i2"),
    "I32": _plain("<i4"),
    "I64": _plain("<i8"),
    "BF16": bf16_to_float32,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
