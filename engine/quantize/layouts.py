"""Moving parts between row order and the layouts, and rows back out of them.

Row order, flat: a packed part is (N, bytes of a row), a scale part (N, numbers of a row).
"""

from __future__ import annotations

import math
from typing import Any, Union

import numpy as np
import numpy.typing as npt

ROWS = 16  # outputs side by side in an interleaved block
Array = npt.NDArray[Any]
Rows = Union[npt.NDArray[np.int64], slice]


def interleaved(part: Array, packed: bool, stride: int | None = None, fill: int = 0) -> Array:
    """Row order → 16 rows side by side.

    A packed part (N, bytes) moves in 4-byte words → (R, stride), the bytes past a row's own zero;
    numbers (N, C) → (R, C, 16). Rows past N hold `fill`.
    """
    outputs = len(part)
    blocks = -(-outputs // ROWS)
    units = np.ascontiguousarray(part).view(np.uint32) if packed else part  # (N, C)
    count = units.shape[1]
    if packed:
        length = count * 4 * ROWS
        out = np.zeros((blocks, stride or length), part.dtype)
        target = out[:, :length].view(np.uint32).reshape(blocks, count, ROWS)
        filler: Any = np.uint32(fill * 0x01010101)
    else:
        out = np.zeros((blocks, count, ROWS), part.dtype)
        target, filler = out, fill
    whole = outputs // ROWS
    target[:whole] = units[: whole * ROWS].reshape(whole, ROWS, count).transpose(0, 2, 1)
    if whole < blocks:
        rest = outputs - whole * ROWS
        target[whole, :, :rest] = units[whole * ROWS :].T
        target[whole, :, rest:] = filler
    return out


def blocked(part: Array, width: int | None) -> Array:
    """Row order → inputs before outputs: (N, bytes) → (K/32, width, N); numbers (N, C) → (C, N)."""
    if width is None:
        return np.ascontiguousarray(part.T)
    return np.ascontiguousarray(part.T).reshape(-1, width, len(part))


def rows_of_interleaved(part: Array, rows: Rows, outputs: int, words: int | None) -> Array:
    """Some rows back in row order; `words` 4-byte words make a row of a packed part."""
    if words is None:
        units = part  # (R, C, 16)
    else:
        units = part[:, : words * 4 * ROWS].view(np.uint32).reshape(len(part), words, ROWS)
    if isinstance(rows, slice) and rows.indices(outputs)[2] == 1:
        start, stop, _ = rows.indices(outputs)
        first = start // ROWS
        chosen = units[first : -(-stop // ROWS)]
        by_row = chosen.transpose(0, 2, 1).reshape(len(chosen) * ROWS, units.shape[1])
        found = by_row[start - first * ROWS : max(stop, start) - first * ROWS]
    else:
        index = np.arange(outputs)[rows]
        found = units[index // ROWS, :, index % ROWS]
    return found if words is None else np.ascontiguousarray(found).view(part.dtype)


def rows_of_blocked(part: Array, rows: Rows) -> Array:
    """(C, N) or (K/32, width, N) → (n, C) or (n, bytes)."""
    chosen = part[..., rows]
    flat = chosen.reshape(math.prod(part.shape[:-1]), chosen.shape[-1])
    return np.ascontiguousarray(flat.T)


def rows_of_row(part: Array, rows: Rows) -> Array:
    """(N, …) → (n, everything else)."""
    chosen = part[rows]
    return chosen.reshape(len(chosen), math.prod(part.shape[1:]))
