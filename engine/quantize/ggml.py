"""GGUF's quantised blocks → the same numbers in row order, without loss.

Layouts after `ggml/src/ggml-common.h` (`block_q4_0` … `block_q6_K`) and the loops of
`dequantize_row_*` in `ggml/src/ggml-quants.c`, which give the order of the values in a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.quantize.schemes import GROUP

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
# Blocks are taken apart in pieces of about this many values, so that temporaries stay small.
_PIECE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A quantised tensor (N, K) in row order: packed parts (N, bytes), scales (N, numbers)."""

    scheme: str
    shape: tuple[int, int]
    parts: Mapping[str, Array]
    zero: int = 0
    group: int = GROUP


def read_blocks(kind: str, raw: Bytes, inputs: int) -> Quantised:
    """raw (N, bytes per row) of a type in BLOCKS."""
    scheme, zero, group, split = BLOCKS[kind]
    step = max(1, _PIECE // inputs)
    pieces = [split(raw[start : start + step]) for start in range(0, len(raw), step)]
    parts = {part: np.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}
    return Quantised(scheme, (len(raw), inputs), parts, zero, group)


def _half(blocks: Bytes, at: int) -> Array:
    """The fp16 at byte `at` of each block: (N, blocks)."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _flat(values: Array) -> Array:
    return values.reshape(len(values), -1)


def _q4_0(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 18)
    return {"q": _flat(blocks[:, :, 2:]), "d": _half(blocks, 0)}


def _q4_1(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 20)
    return {"q": _flat(blocks[:, :, 4:]), "d": _half(blocks, 0), "m": _half(blocks, 2)}


def _fifth(blocks: Bytes, at: int, low: int) -> Array:
    """Five-bit values, the fifth bits in the 4 bytes at `at`, the others from `low` on."""
    packed = blocks[:, :, low:]
    values = np.concatenate((packed & 15, packed >> 4), axis=2)
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, :, at : at + 4]), axis=2, bitorder="little")
    values |= bits << 4
    return values


def _q5_0(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 22)
    values = _fifth(blocks, 2, 6).view(np.int8) - np.int8(16)
    return {"q": _flat(values), "d": _half(blocks, 0)}


def _q5_1(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 24)
    values = _fifth(blocks, 4, 8).view(np.int8)
    return {"q": _flat(values), "d": _half(blocks, 0), "m": _half(blocks, 2)}


def _q8_0(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 34)
    return {"q": _flat(blocks[:, :, 2:]).view(np.int8), "d": _half(blocks, 0)}


def _paired(low: Bytes) -> Array:
    """Values below 16 of groups, (…, 32) → (…, 16) bytes: value i low, value i + 16 high."""
    return low[..., :16] | (low[..., 16:] << 4)


def _six_bit_scales(packed: Bytes) -> tuple[Array, Array]:
    """(N, blocks, 12) → scales and mins (N, blocks, 8), as `get_scale_min_k4` reads them."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=-1)
    least = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=-1)
    return scale, least


def _low_nibbles(qs: Bytes) -> Bytes:
    """(N, blocks, 128) → (N, blocks, 8, 32): chunk i of 32 bytes has group 2i low, 2i + 1 high."""
    chunks = qs.reshape(*qs.shape[:2], 4, 32)
    values = np.empty((*qs.shape[:2], 4, 2, 32), np.uint8)
    np.bitwise_and(chunks, 15, out=values[:, :, :, 0])
    np.right_shift(chunks, 4, out=values[:, :, :, 1])
    return values.reshape(*qs.shape[:2], 8, 32)


def _q4_k(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 144)
    scale, least = _six_bit_scales(blocks[:, :, 4:16])
    return {
        "q": _flat(_paired(_low_nibbles(blocks[:, :, 16:]))),
        "s": _flat(scale),
        "n": _flat(least),
        "d": _half(blocks, 0),
        "dm": _half(blocks, 2),
    }


def _q5_k(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 176)
    scale, least = _six_bit_scales(blocks[:, :, 4:16])
    qh = blocks[:, :, None, 16:48]  # (N, blocks, 1, 32); bit g belongs to group g
    bits = (qh >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # (N, blocks, 8, 32)
    split = bits.reshape(*bits.shape[:3], 2, 4, 4)  # half, c, j
    high = np.zeros((*bits.shape[:3], 4), np.uint8)
    for half in range(2):
        for c in range(4):
            high |= split[..., half, c, :] << (2 * c + half)
    return {
        "q": _flat(_paired(_low_nibbles(blocks[:, :, 48:]))),
        "h": _flat(high),
        "s": _flat(scale),
        "n": _flat(least),
        "d": _half(blocks, 0),
        "dm": _half(blocks, 2),
    }


def _q6_k(raw: Bytes) -> dict[str, Array]:
    blocks = raw.reshape(len(raw), -1, 210)
    count = blocks.shape[1]
    ql = blocks[:, :, :128].reshape(len(raw), count, 2, 2, 32)  # half of the block, part, l
    low = np.empty((len(raw), count, 2, 2, 2, 32), np.uint8)
    np.bitwise_and(ql, 15, out=low[:, :, :, 0])
    np.right_shift(ql, 4, out=low[:, :, :, 1])
    qh = blocks[:, :, 128:192].reshape(len(raw), count, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    bits = ((qh >> shifts) & 3).reshape(len(raw), count, 8, 2, 4, 4)  # group, half, c, j
    high = np.zeros((len(raw), count, 8, 2, 4), np.uint8)
    for half in range(2):
        for c in range(4):
            high[:, :, :, c // 2] |= bits[:, :, :, half, c] << ((c % 2) * 4 + half * 2)
    return {
        "q": _flat(_paired(low.reshape(len(raw), count, 8, 32))),
        "h": _flat(high),
        "s": _flat(np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)),
        "d": _half(blocks, 208),
    }


# ggml type → scheme, zero point, inputs of a group, reader of (N, bytes per row)
BLOCKS: Mapping[str, tuple[str, int, int, Callable[[Bytes], dict[str, Array]]]] = {
    "Q4_0": ("q4", 8, GROUP, _q4_0),
    "Q4_1": ("q4", 0, GROUP, _q4_1),
    "Q5_0": ("q8", 0, GROUP, _q5_0),
    "Q5_1": ("q8", 0, GROUP, _q5_1),
    "Q8_0": ("q8", 0, GROUP, _q8_0),
    "Q4_K": ("q4k", 0, GROUP, _q4_k),
    "Q5_K": ("q5k", 0, GROUP, _q5_k),
    "Q6_K": ("q6k", 0, 16, _q6_k),
}
