"""What a search among options asks, and how it ends, in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from harness.bisect.threshold import Inconclusive

SELDOM = (0.5, 3.0)  # failures and passes that what fails with everything off is taken to have


class Outcome(StrEnum):
    """How a search ends; the store keeps these words."""

    NAMED = "named"
    GRADED = "graded"  # no set of options: many of them, each a little
    INCONCLUSIVE = "inconclusive"
    NOT_REPRODUCED = "not-reproduced"  # it does not fail with everything on
    ALWAYS = "always"  # it fails with everything off as well: no option is to blame
    BOARD_LOST = "board-lost"  # the board or the link failed, again and again


@dataclasses.dataclass(frozen=True)
class Question:
    """Run the engine with these options and no others."""

    phase: str
    options: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Culprits:
    """Options that fail together. `needed` is what they need on top, `beside` what stands before
    one of them in the list and could not be tried without it."""

    options: tuple[str, ...]
    needed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`sets` fail each by itself; without `disable`, and what needs one of these, nothing fails."""

    outcome: Outcome
    sentence: str
    sets: tuple[Culprits, ...] = ()
    disable: tuple[str, ...] = ()
    confidence: float | None = None
    suspects: tuple[str, ...] = ()  # of an inconclusive search: what is left

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in self.sets for name in one.options))


def unclear(among: Sequence[str], move: Inconclusive) -> Verdict:
    """A threshold search that ended with an interval."""
    first, last = max(1, move.first), min(len(among), move.last)
    return Verdict(
        Outcome.INCONCLUSIVE,
        f"{move.reason}; the culprit lies from {among[first - 1]} to {among[last - 1]}",
        suspects=tuple(among[first - 1 : last]),
    )


def contradiction(among: Sequence[str], members: Sequence[str]) -> Verdict:
    """What failed before does not beside the `members` that were found."""
    return Verdict(
        Outcome.INCONCLUSIVE,
        f"what failed before does not fail together with {together(members)} any more: one option "
        "hides what another does",
        suspects=(*among, *reversed(members)),
    )


def graded(most: int, members: Sequence[str], others: Sequence[Culprits]) -> Verdict:
    """`members` were found and do not fail alone."""
    return Verdict(
        Outcome.GRADED,
        f"no set of at most {most} options fails alone: many of them add to it, each a little",
        tuple(others),
        suspects=tuple(reversed(members)),
    )


def named(sets: Sequence[Culprits], already: Sequence[str], off: tuple[str, ...]) -> Verdict:
    """`sets` fail each by itself; nothing does with `already` and `off` switched off. `off` is
    empty where that could not be tried."""
    told = "; and by itself ".join(together(one.options) for one in sets)
    several = sum(len(one.options) for one in sets) > 1
    rest = f"without {' and '.join((*already, *off))} it passes with everything else on"
    if not off:
        rest = "without it alone the engine does not run, so what is enough to switch off is open"
    return Verdict(
        Outcome.NAMED,
        f"{told} {'make' if several else 'makes'} it fail; {rest}",
        tuple(sets),
        (*already, *off) if off else (),
        math.prod(one.probability for one in sets),
    )


def together(names: Sequence[str]) -> str:
    """Options that fail together, in words."""
    return " with ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} with {names[-1]}"


def half_as_often(often: Sequence[int], seldom: Sequence[int]) -> float:
    """The probability that what should fail `seldom` does so at least half as often as what fails
    `often`, from failures and passes of both: Beta posteriors, whose prior says so much."""
    x = (np.arange(2000) + 0.5) / 2000
    density = stats.beta.pdf(x, SELDOM[0] + seldom[0], SELDOM[1] + seldom[1])
    at_most = stats.beta.cdf(np.minimum(2 * x, 1.0), 0.5 + often[0], 0.5 + often[1])
    return float((density * at_most).sum() / density.sum())
