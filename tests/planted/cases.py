"""What a bench of planted faults is made of: cases with their truth, and targets of the scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Case:
    """One planted fault and what was named. Empty `truth` is a clean control; empty `named` means
    that nothing was blamed.

    `kind` groups cases in the table. `runs` counts trials (of `unit`, such as visits). `claimed` is
    the confidence that was stated with the name. `contestant` is whose answer it is.
    """

    kind: str
    truth: frozenset[str]
    named: frozenset[str]
    runs: float
    seconds: float | None = None
    claimed: float | None = None
    contestant: str = OURS
    note: str = ""

    @property
    def verdict(self) -> str:
        """exact, superset (all of the truth and more), wrong or inconclusive; for a clean control
        clean or wrong."""
        if not self.named:
            return "inconclusive" if self.truth else "clean"
        if self.named == self.truth:
            return "exact"
        return "superset" if self.truth and self.named > self.truth else "wrong"


@dataclasses.dataclass(frozen=True)
class Target:
    """`score` of all our cases of `kind` is to be at least, or at most, `limit`.

    Scores: exact, superset, wrong, inconclusive (shares), wrong_high (upper end of the 95 % Wilson
    interval of wrong), runs_mean, runs_p95.
    """

    kind: str
    score: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self) -> str:
        sign, limit = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{self.score} {sign} {limit:g}"


@dataclasses.dataclass(frozen=True)
class Context:
    """`cases` of each kind; the same `seed` plants the same faults. `quick` leaves out what takes
    long. `tell` shows progress to people."""

    cases: int
    seed: int
    quick: bool
    tell: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Bench:
    """`run` yields cases as they are judged. `cases` is how many of each kind a full run takes."""

    name: str
    help: str
    run: Callable[[Context], Iterator[Case]]
    targets: Sequence[Target] = ()
    cases: int = 300
    quick_cases: int = 20
