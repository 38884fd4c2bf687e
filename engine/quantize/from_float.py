"""Float weights → W4 or W8: groups of inputs share a scale, symmetric or with a minimum.

Symmetric: q = clamp(round(w / d)), the weight is d q. Asymmetric: w = d q + m. `d` and `m` are
rounded to their stored type before q is found, so that q makes up for it. At 4 bits, clipping the
rarest weights of a group makes the steps of all others finer: the range that leaves the smallest
squared error is taken from a few, more of them for wide groups.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.quantize.schemes import GROUP

Floats = npt.NDArray[np.float32]

GROUPS = (32, 64, 128)
_NAME = re.compile(r"w(?P<bits>[48])(?:-(?P<group>32|64|128|row))?(?P<asymmetric>a?)")
# shares of the full range that are tried at 4 bits
_RANGES = {32: (1.0, 0.9), 64: (1.0, 0.9, 0.8), 128: (1.0, 0.9, 0.8, 0.7)}
_RANGES_ROW = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
_HALF_NORMAL = 2.0**-14  # the smallest float16 with all its bits
_HALF_LARGEST = 65504.0


@dataclasses.dataclass(frozen=True)
class FloatScheme:
    """How weights are quantised from float. `group` None is the whole row."""

    bits: int
    group: int | None
    asymmetric: bool = False

    @staticmethod
    def parse(text: str) -> FloatScheme:
        """`w4`, `w4-64`, `w4-128a`, `w8`, `w8-32`, …; w4 alone has groups of 32, w8 whole rows."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"scheme is {text!r}, expected w4 or w8, a group (-32, -64, -128 or -row) if "
                "another than w4-32 and w8-row, and a last `a` for asymmetric: w4-128, w4-64a, w8"
            )
        bits = int(match["bits"])
        group = match["group"] or ("32" if bits == 4 else "row")
        return FloatScheme(bits, None if group == "row" else int(group), bool(match["asymmetric"]))

    def __str__(self) -> str:
        return f"w{self.bits}-{self.group or 'row'}{'a' if self.asymmetric else ''}"

    def fitting(self, inputs: int) -> FloatScheme | None:
        """The same with the widest group, at most ours, that divides K; None where none does."""
        if inputs % GROUP:
            return None
        if self.group is None:
            return self
        wide = max(group for group in GROUPS if group <= self.group and inputs % group == 0)
        return dataclasses.replace(self, group=wide)

    @property
    def zero(self) -> int:
        return 8 if self.bits == 4 and not self.asymmetric else 0


def scale_type(largest: float) -> Any:
    """float16 where the scales of a tensor fit it with all their bits, else float32."""
    return np.float16 if _HALF_NORMAL <= largest < _HALF_LARGEST or not largest else np.float32


def largest_number(low: float, high: float, scheme: FloatScheme) -> float:
    """The largest d or |m| that weights between `low` and `high` can get."""
    widest = max(abs(low), abs(high))
    if scheme.asymmetric:
        return widest  # m; d is never larger than 2/15 of it
    return widest / (8 if scheme.bits == 4 else 127)


def quantise_rows(
    values: Floats, scheme: FloatScheme, dtype: Any
) -> tuple[dict[str, npt.NDArray[Any]], float]:
    """Rows (n, K) of finite weights, K a multiple of the group → parts in row order, squared error.

    The parts are `q` (n, bytes) and, of type `dtype`, `d` and for asymmetric schemes `m`
    (n, K/group).
    """
    rows, inputs = values.shape
    group = scheme.group or inputs
    grouped = values.reshape(rows, inputs // group, group)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)  # (n, K/group)
    shares = (1.0,) if scheme.bits == 8 else _RANGES.get(scheme.group or 0, _RANGES_ROW)
    parts, error = _quantised(grouped, low, high, shares[0], scheme, dtype)
    for share in shares[1:]:
        others, other_error = _quantised(grouped, low, high, share, scheme, dtype)
        better = other_error < error  # (n, K/group)
        np.copyto(error, other_error, where=better)
        for part, kept in parts.items():
            chosen = better[:, :, None] if part == "q" else better
            np.copyto(kept, others[part], where=chosen)
    q = parts["q"].reshape(rows, inputs)
    parts["q"] = packed_nibbles(q.view(np.uint8)) if scheme.bits == 4 else q
    return parts, float(error.sum(dtype=np.float64))


def _quantised(
    grouped: Floats, low: Floats, high: Floats, share: float, scheme: FloatScheme, dtype: Any
) -> tuple[dict[str, npt.NDArray[Any]], Floats]:
    """Parts and each group's squared error when `share` of its range is covered.

    q is int8 (n, K/group, group), counted from 0 at 4 bits; d and m (n, K/group).
    """
    parts: dict[str, npt.NDArray[Any]] = {}
    if scheme.asymmetric:
        least, most = (0, 15) if scheme.bits == 4 else (-128, 127)
        middle, half = low / 2 + high / 2, (high / 2 - low / 2) * np.float32(share)
        d = (half * np.float32(2 / (most - least))).astype(dtype)
        m = (middle - half - d.astype(np.float32) * np.float32(least)).astype(dtype)
        parts["m"] = m
        target = grouped - m.astype(np.float32)[:, :, None]
    elif scheme.bits == 4:
        least, most, target = -8, 7, grouped
        # The side that reaches farther gets the eighth step, which only one side has.
        d = (np.where(high > -low, -high, -low) * np.float32(share / 8)).astype(dtype)
    else:
        least, most, target = -127, 127, grouped
        d = (np.maximum(high, -low) * np.float32(share / 127)).astype(dtype)
    wide = d.astype(np.float32)[:, :, None]
    ratio = target / np.where(wide == 0, np.float32(np.inf), wide)  # 0 where the step is
    np.rint(ratio, out=ratio)
    np.clip(ratio, least, most, out=ratio)
    q = ratio.astype(np.int8)
    ratio *= wide
    ratio -= target
    if scheme.bits == 4:
        q += np.int8(scheme.zero)
    return {"q": q, "d": d, **parts}, np.einsum("rgi,rgi->rg", ratio, ratio)


def packed_nibbles(q: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """q (n, K) below 16 → bytes (n, K/2): of 32 inputs, i low and i + 16 high."""
    halves = q.reshape(len(q), -1, 2, 16)
    both = halves[:, :, 0] | (halves[:, :, 1] << 4)  # (n, K/32, 16)
    return np.ascontiguousarray(both.reshape(len(q), -1), np.uint8)
