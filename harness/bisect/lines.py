"""A line of revisions between a good and a bad one, as the searches for a culprit see it.

Position 0 is the good revision, the last one the bad one. What runs on a board is a build, and two
positions may have the same one: then a trial of either tells about both. Some builds cannot be
tested (they do not compile, or the engine does not start); positions that no trial can tell apart
are one candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a search over revisions ends. Only NAMED blames one revision."""

    NAMED = "named"
    RANGE = "range"  # some of it cannot be tested: it is one of these
    INCONCLUSIVE = "inconclusive"  # the budget is spent; the credible interval stands
    UNVERIFIED = "unverified"  # named by the search, and not confirmed against its parent
    GOOD_FAILS = "good-fails"
    BAD_PASSES = "bad-passes"
    SAME_BUILD = "same-build"  # nothing that runs on a board differs between the two
    ENVIRONMENT = "environment"  # the good revision itself changed while the search went on
    UNTESTABLE = "untestable"  # the good or the bad revision cannot be tested


@dataclasses.dataclass(frozen=True)
class Question:
    """Try the build at `position`. `phase` says what for."""

    position: int
    phase: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of a search. `positions` are to blame together: one when it is NAMED, the credible
    interval when it is INCONCLUSIVE. `confidence` is their probability."""

    outcome: Outcome
    sentence: str
    positions: tuple[int, ...] = ()
    confidence: float | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Positions that are to blame or not together: those below `first` are good then, those from
    `last` on bad. All but `last` cannot be tested."""

    positions: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.positions[0]

    @property
    def last(self) -> int:
        return self.positions[-1]


class Line:
    """Which positions can be blamed and tested. `builds[i]` names what runs at position i."""

    def __init__(self, builds: Sequence[str]) -> None:
        """Raises ValueError for fewer than two positions."""
        if len(builds) < 2:
            raise ValueError(f"a line of {len(builds)} revisions, expected at least two")
        self.builds = tuple(builds)
        self._untestable: set[str] = set()
        self._candidates: tuple[Candidate, ...] | None = None

    @property
    def last(self) -> int:
        """The position of the bad revision."""
        return len(self.builds) - 1

    @property
    def same_ends(self) -> bool:
        """Whether the good and the bad revision are one build."""
        return self.builds[0] == self.builds[-1]

    def exclude(self, position: int) -> None:
        """The build at `position` cannot be tested, wherever it occurs."""
        self._untestable.add(self.builds[position])
        self._candidates = None

    def testable(self, position: int) -> bool:
        return self.builds[position] not in self._untestable

    def canonical(self, position: int) -> int:
        """The first position with the same build: under it, observations are pooled."""
        return self.builds.index(self.builds[position])

    def candidates(self) -> tuple[Candidate, ...]:
        """Everything that may be to blame, in order.

        No change lies between two positions of the same build, since then one build would be both
        good and bad.
        """
        if self._candidates is None:
            self._candidates = tuple(self._found())
        return self._candidates

    def _found(self) -> list[Candidate]:
        latest = {build: at for at, build in enumerate(self.builds)}
        found: list[Candidate] = []
        pending: list[int] = []  # positions since the last one that can be tested
        reach = -1  # the last position of any testable build that was seen already
        before = 0  # the last testable position
        reach = latest[self.builds[0]]
        for position in range(1, len(self.builds)):
            changed = self.builds[position] != self.builds[position - 1]
            if changed:
                pending.append(position)
            if not self.testable(position):
                continue
            # A change between `before` and here splits no build only if all that was seen ends
            # before it.
            if pending and reach <= before:
                found.append(Candidate(tuple(pending)))
            pending = []
            before = position
            reach = max(reach, latest[self.builds[position]])
        return found
