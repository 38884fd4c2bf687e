"""What a search among options asks, and how it ends."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


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
