"""Nights of one board: the screen that picks suspects, the environment, the board's noise floor.

A screen is cheap and wrong now and then; it never alerts. What it picks is measured again as A
against B on the same board (harness.statistics.pairs), and that alone decides. Where most series
of a board move together, the board moved, not the engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from harness.statistics.pairs import MARGIN

LEAST_NIGHTS = 5  # of a segment, before tonight
MOST_NIGHTS = 20
SCREEN_P = 0.02
TOGETHER = 0.6  # of a board's series, at least
LEAST_SERIES = 3  # with two, one suspect would be most of them
DETECTED_SDS = 4.0  # of a difference of two nights; see NoiseFloor


@dataclasses.dataclass(frozen=True)
class Screen:
    """Tonight against the nights before. `shift` is tonight over their mean (log scale) minus 1.

    `suspect` None: too few nights to tell. `p` is one-sided, for being worse.
    """

    suspect: bool | None
    shift: float | None
    p: float | None
    nights: int


def screen(before: npt.ArrayLike, tonight: float, *, larger_is_better: bool = False) -> Screen:
    """Asks whether `tonight` is worse than the nights `before` (N,), the oldest first.

    A one-sided prediction t on the log scale, over the last 20 nights: a new value scatters around
    their mean by s·√(1 + 1/n). Values that are not finite or positive are nights without one.
    """
    x = np.asarray(before, np.float64).ravel()
    x = np.log(x[np.isfinite(x) & (x > 0)])[-MOST_NIGHTS:]
    n = len(x)
    if n < LEAST_NIGHTS or not (math.isfinite(tonight) and tonight > 0):
        return Screen(None, None, None, n)
    shift = math.log(tonight) - float(x.mean())
    worse = -shift if larger_is_better else shift
    scatter = float(x.std(ddof=1)) * math.sqrt(1 + 1 / n)
    if scatter == 0:  # nights without any noise
        return Screen(worse > 0, math.expm1(shift), 0.0 if worse > 0 else 1.0, n)
    p = float(stats.t.sf(worse / scatter, n - 1))
    return Screen(p < SCREEN_P, math.expm1(shift), p, n)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Whether a board's series moved together. `share` of them moved the same way."""

    shifted: bool
    share: float
    direction: str  # "worse", "better" or ""
    series: int


def environment(shifts: Mapping[str, float], floors: Mapping[str, float]) -> Environment:
    """Asks whether tonight's shifts of a board are its own: series → shift, positive is worse.

    A series moved when its shift is beyond its `floors`, the scatter (standard deviation) of its
    nights, or 1 % where that is more. From 60 % of at least three series on, in one direction, it
    is the environment: heat, a governor, a new kernel, another load.
    """
    known = {name: shift for name, shift in shifts.items() if math.isfinite(shift)}
    if len(known) < LEAST_SERIES:
        return Environment(False, 0.0, "", len(known))
    moved = [
        math.copysign(1.0, shift)
        for name, shift in known.items()
        if abs(shift) > max(MARGIN, floors.get(name, 0.0))
    ]
    worse, better = moved.count(1.0), moved.count(-1.0)
    share = max(worse, better) / len(known)
    direction = "" if worse == better else "worse" if worse > better else "better"
    return Environment(share >= TOGETHER and direction != "", share, direction, len(known))


@dataclasses.dataclass(frozen=True)
class NoiseFloor:
    """What nights of one engine and one model differ by on a board, for nothing: a free A/A.

    `sd` is the standard deviation of one night (log scale, so .01 is 1 %); `detectable` the
    smallest change that a night shows beyond doubt. None: no two nights in a row were alike.
    """

    sd: float | None
    detectable: float | None
    pairs: int

    @property
    def sentence(self) -> str:
        if self.sd is None or self.detectable is None:
            return "no two nights ran the same engine and model yet: the noise is not known"
        return (
            f"a night scatters by {self.sd:.1%} ({self.pairs} pairs of equal nights); a change of "
            f"{self.detectable:.1%} shows in one night"
        )


def noise_floor(values: Sequence[float], versions: Sequence[str]) -> NoiseFloor:
    """From nights in order: values (N,), positive, and what ran (N,). Neighbours that ran the same
    are pairs; half the squared difference of a pair estimates the variance, so that a step between
    two versions is no noise. The median over pairs (with its factor for normal noise) stands for
    it: a single odd night does not make a board noisy.
    """
    differences = [
        math.log(after / before)
        for before, after, first, second in zip(
            values, values[1:], versions, versions[1:], strict=False
        )
        if first == second and before > 0 and after > 0 and math.isfinite(after / before)
    ]
    if not differences:
        return NoiseFloor(None, None, 0)
    # The median of |N(0, σ)| is .6745 σ, and a difference of two nights has √2 the scatter of one.
    spread = float(np.median(np.abs(differences))) / float(stats.norm.ppf(0.75))
    sd = spread / math.sqrt(2)
    return NoiseFloor(sd, max(MARGIN, DETECTED_SDS * sd), len(differences))


@dataclasses.dataclass(frozen=True)
class Record:
    """How often a detector was right. `precision` None: none of its alerts was decided yet."""

    detector: str
    alerts: int
    right: int
    wrong: int
    open: int

    @property
    def precision(self) -> float | None:
        decided = self.right + self.wrong
        return self.right / decided if decided else None


def ledger(alerts: Sequence[tuple[str, bool | None]]) -> list[Record]:
    """(detector, was it right; None while undecided) → a record each, the least precise first."""
    found = []
    for name in sorted({detector for detector, _ in alerts}):
        endings = [right for detector, right in alerts if detector == name]
        right, wrong = endings.count(True), endings.count(False)
        found.append(Record(name, len(endings), right, wrong, len(endings) - right - wrong))
    return sorted(found, key=lambda item: (item.precision is None, item.precision or 0.0))
