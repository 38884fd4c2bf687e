"""A simulated board with races: what a configuration of steps leads to, by chance."""

from __future__ import annotations

import dataclasses
import random

from harness.bisect.race import RaceSearch, Verdict
from harness.bisect.sets import Configuration
from harness.bisect.trials import Result


@dataclasses.dataclass(frozen=True)
class Planted:
    """A race that shows with probability `p` while all `steps` are asynchronous, and with `raised`
    while the result of one of them is held back. While one of `hidden_by` is asynchronous too,
    `masked` of that remains."""

    steps: frozenset[str]
    p: float
    raised: float | None = None
    hidden_by: frozenset[str] = frozenset()
    masked: float = 0.0


@dataclasses.dataclass
class World:
    """`background`: probability that a trial fails whatever is asynchronous. `lost`, `other`: that
    the board is lost in it, and that it fails in another way."""

    steps: list[str]
    planted: list[Planted]
    chance: random.Random
    background: float = 0.0
    lost: float = 0.0
    other: float = 0.0
    runs: int = 0

    def fails(self, on: frozenset[str], delayed: frozenset[str] = frozenset()) -> bool:
        """One run."""
        self.runs += 1
        failed = self.chance.random() < self.background
        for race in self.planted:
            if race.steps <= on:
                held = race.raised is not None and bool(race.steps & delayed)
                p = race.raised if held and race.raised is not None else race.p
                if race.hidden_by & on:
                    p *= race.masked
                failed = (self.chance.random() < p) or failed
        return failed

    def trial(self, configuration: Configuration) -> tuple[Result, str | None]:
        if self.chance.random() < self.lost:
            return Result.INFRA, "board-lost"
        if self.chance.random() < self.other:
            return Result.FAIL, "died by SIGSEGV"
        if self.fails(configuration.on, configuration.delayed):
            return Result.FAIL, "wrong numbers"
        return Result.PASS, None


def steps_of(count: int) -> list[str]:
    """Ids in the order of a program."""
    return [f"s{number:03d}" for number in range(count)]


def search(world: World, *, delta: float, budget: int, delays: bool) -> tuple[Verdict, int]:
    """(verdict, trials) of our search in this world."""
    found = RaceSearch(world.steps, delta=delta, budget=budget, delays=delays)
    while True:
        question = found.ask()
        if isinstance(question, Verdict):
            return question, found.trials
        found.tell(*world.trial(question.configuration))
