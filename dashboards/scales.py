"""Arithmetic of axes: round tick values, positions, and thinning that keeps the extremes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

UPRIGHT_ROOM = 26  # pixels that a label needs on a narrow screen, upright and along
LEVEL_ROOM = 100


@dataclasses.dataclass(frozen=True)
class Tick:
    """`at` is the position in pixels. `minor` ticks lose their label where room is short."""

    at: float
    label: str
    minor: bool = False
    anchor: str = "middle"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps values from [low, high] to pixels from [start, end]; `end` may be smaller (y axes)."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def step_of(span: float, count: int) -> float:
    """The 1-2-5 step that cuts `span` (> 0) into at most about `count` parts."""
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10):
        if raw <= factor * power * 1.0000001:
            return factor * power
    return 10 * power


def bounds(
    values: Sequence[float], *, zero: bool = False, pad: float = 0.06
) -> tuple[float, float]:
    """An interval that holds `values` with some air; never empty. `zero` makes it begin at 0."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if zero:
        return 0.0, high * (1 + pad) if high > 0 else 1.0
    if high - low < 1e-12 * max(abs(high), 1e-12):
        air = abs(high) * 0.1 or 1.0
    else:
        air = (high - low) * pad
    return low - air, high + air


def ticks(scale: Scale, count: int, *, suffix: str = "") -> tuple[Tick, ...]:
    """Ticks at round values inside the scale, at least two of them.

    Those that would touch at the larger letters of narrow screens are minor.
    """
    while True:
        step = step_of(scale.high - scale.low, count)
        first = math.ceil(scale.low / step - 1e-9)
        last = math.floor(scale.high / step + 1e-9)
        if last > first:
            break
        count *= 2  # one tick alone gives no scale
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    upright = scale.start > scale.end
    apart = abs(scale(step) - scale(0.0)) or 1.0
    every = max(1, math.ceil((UPRIGHT_ROOM if upright else LEVEL_ROOM) / apart))
    found = []
    for index in range(first, last + 1):
        value = index * step
        label = f"{value:,.{digits}f}".replace(",", "\u202f").replace("-", "\u2212")
        found.append(Tick(scale(value), label + suffix, minor=index % every > 0))
    return tuple(found)


def time_ticks(scale: Scale, count: int) -> tuple[Tick, ...]:
    """Ticks of an axis in seconds, in whole seconds, minutes or hours."""
    span = scale.high - scale.low
    unit, name = (1.0, "s") if span <= 180 else (60.0, "min") if span <= 3 * 3600 else (3600.0, "h")
    inner = Scale(scale.low / unit, scale.high / unit, scale.start, scale.end)
    return ticks(inner, count, suffix=f" {name}")


def log_ticks(scale: Scale) -> tuple[Tick, ...]:
    """Ticks of a scale whose values are log10: one per decade, thinned to at most about 8."""
    first, last = math.ceil(scale.low - 1e-9), math.floor(scale.high + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 8))
    return tuple(
        Tick(
            scale(power),
            f"1e{power}".replace("-", "\u2212"),
            minor=(power - first) % (2 * stride) > 0,
        )
        for power in range(first, last + 1, stride)
    )


def decimate(
    xs: Sequence[float], ys: Sequence[float | None], columns: int
) -> list[list[tuple[float, float]]]:
    """Min-max thinning into at most `columns` columns, as unbroken stretches of points.

    Every column keeps its first, lowest, highest and last point, so peaks survive. A missing value
    (None or not finite) ends a stretch: gaps in a measurement are shown as gaps.
    """
    stretches: list[list[tuple[float, float]]] = []
    current: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if y is None or not math.isfinite(y) or not math.isfinite(x):
            if current:
                stretches.append(current)
            current = []
        else:
            current.append((x, y))
    if current:
        stretches.append(current)
    total = sum(len(stretch) for stretch in stretches)
    if total <= 2 * columns:
        return stretches
    first, last = stretches[0][0][0], stretches[-1][-1][0]
    width = (last - first) / columns or 1.0
    return [_thin(stretch, first, width) for stretch in stretches]


def _thin(
    stretch: list[tuple[float, float]], first: float, width: float
) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    column: list[tuple[float, float]] = []
    place = 0
    for point in stretch:
        here = int((point[0] - first) / width)
        if column and here != place:
            kept += _extremes(column)
            column = []
        place = here
        column.append(point)
    return kept + _extremes(column)


def _extremes(column: list[tuple[float, float]]) -> list[tuple[float, float]]:
    values = [value for _, value in column]
    low, high = values.index(min(values)), values.index(max(values))
    return [column[index] for index in sorted({0, low, high, len(column) - 1})]


def path(points: Sequence[tuple[float, float]]) -> str:
    """SVG path data through `points` (already in pixels)."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def level(value: float, edges: Sequence[float]) -> int:
    """How many of the ascending `edges` are at or below `value`."""
    return sum(edge <= value for edge in edges)
