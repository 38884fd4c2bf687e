"""Random weights written straight as ggml blocks: valid, sane in size, the same for a seed.

No library quantises to K-quants, and random weights need no rounding: any bytes are a valid block
once its scales are sensible. Values are uniform; each block's sign is random, so that the odd step
of an unsymmetric range gives the matrix no mean. Layouts: `block_*` of ggml's `ggml-common.h`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def random_rows(kind: str, shape: tuple[int, int], deviation: float, seed: str) -> Bytes:
    """A tensor (N, K) of that type, as bytes (N, bytes per row); K is a multiple of its block.

    Raises ValueError for a type that is not among `KINDS` or a K that is no whole number of blocks.
    """
    if kind not in KINDS:
        raise ValueError(f"random weights of type {kind!r}, known: {', '.join(KINDS)}")
    elements, make = KINDS[kind]
    rows, inputs = shape
    if inputs % elements:
        raise ValueError(f"{kind} has blocks of {elements} values, {inputs} in a row are no whole")
    digest = hashlib.sha256(f"{seed}\0{kind}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], "<u8")))
    return make(rng, rows * inputs // elements, deviation).reshape(rows, -1)


def _random(rng: np.random.Generator, *shape: int) -> Bytes:
    return np.frombuffer(rng.bytes(math.prod(shape)), np.uint8).reshape(shape)


def _half(values: npt.NDArray[np.floating]) -> Bytes:
    """(n,) → its fp16 bytes (n, 2)."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _scales(rng: np.random.Generator, count: int, size: float) -> npt.NDArray[np.float64]:
    """Some spread of scales, of random sign, around `size`; their mean square is size²."""
    sizes = rng.uniform(0.75, 1.25, count)
    sizes /= math.sqrt(1 + 0.25**2 / 3)
    return np.asarray(size * sizes * rng.choice((-1.0, 1.0), count))


def _q4_0(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    # 0..15 − 8: mean square 21.5
    d = _scales(rng, count, deviation / math.sqrt(21.5))
    return np.concatenate((_half(d), _random(rng, count, 16)), axis=1)


def _q8_0(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    values = rng.integers(-127, 128, (count, 32), np.int8)
    d = _scales(rng, count, deviation / math.sqrt((255**2 - 1) / 12))
    return np.concatenate((_half(d), values.view(np.uint8)), axis=1)


def _q4_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    """d s q − dmin m, with m = s and dmin = 7.5 d: symmetric around zero."""
    s = rng.integers(32, 64, (count, 8), np.uint8)
    mean_square = float(np.mean(np.arange(32, 64) ** 2))
    d = _scales(rng, count, deviation / math.sqrt(21.25 * mean_square))
    packed = np.empty((count, 12), np.uint8)
    packed[:, 0:4] = (s[:, :4] & 63) | (s[:, 4:] >> 4 << 6)
    packed[:, 4:8] = packed[:, 0:4]
    packed[:, 8:12] = (s[:, 4:] & 15) | (s[:, 4:] & 15) << 4
    return np.concatenate((_half(d), _half(7.5 * d), packed, _random(rng, count, 128)), axis=1)


def _q6_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    # d s (0..63 − 32): mean square 341.5
    s = rng.integers(64, 128, (count, 16), np.int8) * rng.choice(
        np.array((-1, 1), np.int8), (count, 16)
    )
    mean_square = float(np.mean(np.arange(64, 128) ** 2))
    d = _scales(rng, count, deviation / math.sqrt(341.5 * mean_square))
    return np.concatenate((_random(rng, count, 192), s.view(np.uint8), _half(d)), axis=1)


# type → values of a block, and how so many blocks are made
KINDS: Mapping[str, tuple[int, Callable[[Any, int, float], Bytes]]] = {
    "Q4_0": (32, _q4_0),
    "Q8_0": (32, _q8_0),
    "Q4_K": (256, _q4_k),
    "Q6_K": (256, _q6_k),
}
