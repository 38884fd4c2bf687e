"""What a night's numbers lead to: which are looked into, what an A/B makes of them, what alerts.

A series is one number of one board (smaller is better) over its nights, with model, parameters and
quantisation the same. Its segment begins with a change that was confirmed or an event that somebody
declared, and with nothing else: a night that was better, and one that belonged to the environment,
are no part of the baseline that later nights are held against.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from harness.statistics.nights import (
    LEAST_NIGHTS,
    MOST_NIGHTS,
    Environment,
    environment,
    noise_floor,
    screen,
)
from harness.statistics.pairs import BETTER, EQUIVALENT, MARGIN, WORSE

Array = npt.NDArray[np.float64]

IMPROVED_P = 0.005  # seldom enough that a baseline does not lose its good half by chance
EXACT = 1e-9  # of a log ratio: nights of one engine that computes the same bits
EXACT_SHIFT = 0.1  # of a loss that is computed exactly: less is another rounding
PROVEN = 5  # nights of an engine in the baseline: from then on it is not to blame itself
EXPLAINED = 0.5  # of a night's shift: an A/B that cannot tell clears an engine of less than this
NOISE_RECENT = (12, 24)  # nights
NOISE_BEFORE = 20
NOISE_NIGHTS = 60  # of which the newest are held against the others
NOISE_CAP = 4.0  # of a series' usual step: one odd night of one series says no more than that
# Steps overlap, which the test does not know, and it is asked each night: both are in this p.
NOISE_P = 2e-5
NOISE_RATIO = 1.5


class Night(NamedTuple):
    """`value` None: nothing was measured; `valid` False: it may not be judged (it throttled).
    `build` names what ran."""

    value: float | None
    build: str = ""
    valid: bool = True

    @property
    def usable(self) -> bool:
        return (
            self.valid and self.value is not None and self.value > 0 and math.isfinite(self.value)
        )


@dataclasses.dataclass(frozen=True)
class Look:
    """One series tonight. `suspect` None: it cannot be told. `shift` is tonight over the baseline
    minus 1, positive is worse; `good_night` the place of the night of the baseline whose engine
    tonight's is compared with, `same_build` that it is the same."""

    suspect: bool | None
    improved: bool
    shift: float | None
    p: float | None
    nights: int
    level: float | None
    good_night: int | None
    same_build: bool
    exact: bool = False


def baseline(nights: Sequence[Night], begin: int = 0, apart: Collection[int] = ()) -> list[int]:
    """Places of the nights that later ones are held against, at most the newest 20.

    `begin` is where the segment begins; `apart` are nights that were told to be the board's or the
    environment's.
    """
    kept: list[int] = []
    logs: list[float] = []
    for place in range(begin, len(nights)):
        night = nights[place]
        if place in apart or not night.usable or night.value is None:
            continue
        value = math.log(night.value)
        if not _better(logs[-MOST_NIGHTS:], value):
            kept.append(place)
            logs.append(value)
    return kept[-MOST_NIGHTS:]


def _better(logs: Sequence[float], tonight: float) -> bool:
    """Whether tonight is better than the nights before by more than they differ: the screen's own
    prediction t, from the other side. Called for every night of every series: no scipy here."""
    n = len(logs)
    if n < LEAST_NIGHTS:
        return False
    mean = sum(logs) / n
    gain = mean - tonight
    if gain < math.log1p(MARGIN):
        return False
    variance = sum((value - mean) ** 2 for value in logs) / (n - 1)
    return gain > _critical(n - 1) * math.sqrt(variance * (1 + 1 / n))


@functools.cache
def _critical(freedom: int) -> float:
    return float(stats.t.isf(IMPROVED_P, freedom))


def look(
    nights: Sequence[Night],
    begin: int = 0,
    apart: Collection[int] = (),
    *,
    computed: bool = False,
) -> Look:
    """The last of `nights` against its segment. A suspect is beyond the screen and at least 1 %
    worse: what is less is none for the A/B either. `computed`: the number is no measurement, but
    follows from the engine; where the nights before are alike to the last bit, it has to be 10 %
    worse, and needs no A/B."""
    *before, tonight = nights
    kept = baseline(before, begin, apart)
    values = [float(before[at].value or 0.0) for at in kept]
    # A small change of some nights ago may be in the baseline already, whatever was built since:
    # until an engine is proven, it is compared with one from the middle of the baseline.
    others = [at for at in kept if before[at].build != tonight.build]
    proven = len(kept) - len(others) >= PROVEN or not others
    good = others[len(others) // 2] if others else None
    if proven:
        good = next((at for at in reversed(kept) if before[at].build == tonight.build), None)
    same = good is not None and before[good].build == tonight.build
    level = math.exp(float(np.mean(np.log(values)))) if values else None
    if not tonight.usable or tonight.value is None or len(values) < LEAST_NIGHTS:
        return Look(None, False, None, None, len(values), level, good, same)
    found = screen(values, tonight.value)
    exact = computed and float(np.std(np.log(values))) < EXACT
    worse = bool(found.suspect) and (found.shift or 0.0) >= (EXACT_SHIFT if exact else MARGIN)
    better = _better([math.log(value) for value in values], math.log(tonight.value))
    return Look(worse, better, found.shift, found.p, len(values), level, good, same, exact)


class Decided(StrEnum):
    """What became of a suspect. Only CONFIRMED alerts, and ends a segment."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"  # the A/B clears the engine: noise, or something of that night alone
    ENVIRONMENT = "environment"  # the board's series moved together
    BOARD = "board"  # the engine is the one that was good
    UNDECIDED = "undecided"  # no A/B, or none that could tell

    @property
    def alerts(self) -> bool:
        return self is Decided.CONFIRMED

    @property
    def apart(self) -> bool:
        """Whether the night is kept out of the baseline."""
        return self is not Decided.CONFIRMED

    @property
    def right(self) -> bool | None:
        """Whether the screen was right about the engine; None where that is not known."""
        return {Decided.CONFIRMED: True, Decided.UNDECIDED: None}.get(self, False)


def needs_ab(found: Look) -> bool:
    """Whether an A/B is to decide: not where the engine is the same, nor where it computes the same
    bits each night, so that the nights themselves are the comparison."""
    return bool(found.suspect) and not found.same_build and not found.exact


class Answer(NamedTuple):
    """What an A/B of tonight's engine against the good one says of one number. `most` is the
    upper end of its interval of B over A, minus 1; None where it is not known."""

    verdict: str | None
    most: float | None = None


def asks_again(verdicts: Iterable[str | None]) -> bool:
    """Whether an A/B is to be repeated before it alerts. A farm asks hundreds of A/Bs in a month;
    on a board that scatters by 2 % each wrongly blames a number once in some 170, and two that
    agree, measured one after the other, once in some 30,000."""
    return WORSE in verdicts


def settled(first: Answer, second: Answer | None) -> Answer:
    """Of two A/Bs of one number the second, where the first blamed the engine. One alone blames
    nobody."""
    return (second or Answer(None)) if first.verdict == WORSE else first


def decide(found: Look, together: Environment, answer: Answer | None) -> Decided:
    """What a suspect is. `answer` is None where there was no A/B.

    An engine can move all series of a board as well: where it is another than the good one,
    the A/B decides, which the environment cannot move. One that cannot tell a small difference may
    still leave the engine too little of the night's.
    """
    if found.same_build:
        return Decided.ENVIRONMENT if together.shifted else Decided.BOARD
    if found.exact or (answer is not None and answer.verdict == WORSE):
        return Decided.CONFIRMED
    if answer is not None and (answer.verdict in (EQUIVALENT, BETTER) or _little(found, answer)):
        return Decided.ENVIRONMENT if together.shifted else Decided.REFUTED
    return Decided.UNDECIDED


def _little(found: Look, answer: Answer) -> bool:
    if answer.most is None or found.shift is None:
        return False
    return answer.most < EXPLAINED * found.shift


def moved_together(looks: Mapping[str, Look], floors: Mapping[str, float]) -> Environment:
    """Whether a board's series moved together tonight; exact ones have no part in it."""
    shifts = {
        name: found.shift
        for name, found in looks.items()
        if found.shift is not None and not found.exact
    }
    return environment(shifts, floors)


def floors_of(series: Mapping[str, Sequence[Night]]) -> dict[str, float]:
    """Series → what equal nights of it scatter by, for those where that is known."""
    found = {}
    for name, nights in series.items():
        usable = [night for night in nights if night.usable]
        floor = noise_floor([n.value or 0.0 for n in usable], [n.build for n in usable])
        if floor.sd is not None:
            found[name] = floor.sd
    return found


@dataclasses.dataclass(frozen=True)
class NoiseGrowth:
    """`ratio` is the scatter of the newest nights over that before, None: too few nights; `p`
    None: it was not asked for, since the ratio is small."""

    grew: bool
    ratio: float | None
    p: float | None


def noise_growth(series: Sequence[Sequence[Night]]) -> NoiseGrowth:
    """Asks whether a board became noisier, over all of its series (nights aligned, the oldest
    first).

    Each night's step from the night before, by the series' own earlier median step, averaged over
    the series; the newest 12, and the newest 24, against those before by rank (H. B. Mann, D. R.
    Whitney, "On a test of whether one of two random variables is stochastically larger", 1947), so
    that heavy tails and series that move together cost power only. The few show soon what is much
    noisier, the many what is a little. A step to another level is one odd night.
    """
    logs = [_logs(whole[-NOISE_NIGHTS:]) for whole in series]
    steps = [np.abs(np.diff(one)) for one in logs]
    grown = [_grown(steps, recent) for recent in NOISE_RECENT]
    return min(grown, key=lambda one: (1.0 if one.p is None else one.p, -(one.ratio or 0.0)))


def _logs(nights: Sequence[Night]) -> Array:
    return np.array([math.log(n.value) if n.usable and n.value else math.nan for n in nights])


def _grown(series: Sequence[Array], recent: int) -> NoiseGrowth:
    """The newest `recent` steps of all series (nights - 1,) against those before them."""
    rows = []
    for steps in series:
        early = steps[:-recent]
        early = early[np.isfinite(early)]
        if len(early) >= NOISE_BEFORE and np.median(early) > EXACT:
            rows.append(np.minimum(steps / np.median(early), NOISE_CAP))
    if not rows or len({len(row) for row in rows}) != 1:
        return NoiseGrowth(False, None, None)
    table = np.stack(rows)  # (series, nights - 1)
    known = np.isfinite(table).any(axis=0)
    table = table[:, known]
    if table.shape[1] < recent + NOISE_BEFORE:
        return NoiseGrowth(False, None, None)
    told = np.nanmean(table, axis=0)
    new, old = told[-recent:], told[:-recent]
    ratio = float(np.median(new) / np.median(old))
    if ratio < NOISE_RATIO:  # most boards, most nights: the test would not matter
        return NoiseGrowth(False, ratio, None)
    p = float(stats.mannwhitneyu(new, old, alternative="greater").pvalue)
    return NoiseGrowth(p < NOISE_P, ratio, p)
