"""Which set of steps does it take to make something fail, when failing is a matter of chance?

A configuration fails with probability p if it holds the set, and with the background rate q
otherwise. Members are found one by one, each as the threshold of a prefix search beside those that
were found before (as Go's bisect and delta debugging narrow down sets, Zeller and Hildebrandt 2002,
with each answer weighed by its chance).

The functions are generators: they yield questions, are sent failures and passes, and return what
they found. Equal answers lead to equal questions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from scipy.special import betaln

from harness.bisect.threshold import Found, Inconclusive, ThresholdSearch

MOST_MEMBERS = 5
SURE_FAILURES = 3  # that a named set shows on its own, at least
MOST_WEIGHT = 10  # failures that a rate is believed to rest on; it differs between configurations
MOST_PASSES = 1000  # of one configuration in a row
UNBOUND = 1 << 60
ALONE = 0.7  # prior probability that no further member is needed
NEVER = 0.02  # prior probability that what is believed to fail does not

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is on, and what is delayed beside that."""

    on: frozenset[str]
    delayed: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Question:
    """Try this, up to `repeats` times, ending with the first failure."""

    configuration: Configuration
    repeats: int
    phase: str


Asking = Generator[Question, tuple[int, int], T]  # is sent failures and passes


class BudgetSpent(Exception):
    """No trial is left."""


class Contradiction(Exception):
    """What was seen to fail does not any more: turning a step on hides the failure, or a delay
    does."""


class Unnamed(Exception):
    """A threshold that could not be told. Carries the search's own end."""

    def __init__(self, end: Inconclusive) -> None:
        super().__init__(end.reason)
        self.end = end


@dataclasses.dataclass(frozen=True)
class Rate:
    """A probability of failing that is known from failures and passes: a Beta distribution over
    `prior` pseudo-counts. At most MOST_WEIGHT failures count, and passes in proportion."""

    failures: int
    passes: int
    prior: tuple[float, float] = (0.5, 0.5)

    @property
    def _beta(self) -> tuple[float, float]:
        share = min(1.0, MOST_WEIGHT / self.failures) if self.failures else 1.0
        return self.prior[0] + self.failures * share, self.prior[1] + self.passes * share

    @property
    def mean(self) -> float:
        a, b = self._beta
        return a / (a + b)

    def log_evidence(self, failures: int, passes: int) -> float:
        """Log probability of these results, in their order."""
        a, b = self._beta
        return float(betaln(a + failures, b + passes) - betaln(a, b))

    def passes_until(self, delta: float) -> int:
        """So many passes happen with at most this probability."""
        for passes in range(1, MOST_PASSES):
            if math.exp(self.log_evidence(0, passes)) <= delta:
                return passes
        return MOST_PASSES


def probability_bad(bad: Rate, good: Rate, failures: int, passes: int, prior: float = 0.5) -> float:
    """That a configuration with these results fails with the rate `bad`, not `good`."""
    odds = math.log(prior / (1 - prior))
    odds += bad.log_evidence(failures, passes) - good.log_evidence(failures, passes)
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, odds))))


class Evidence:
    """Every result by its configuration, and how many may still be had."""

    def __init__(self, budget: int) -> None:
        self.budget, self.trials = budget, 0
        self._counts: dict[Configuration, list[int]] = {}

    def ask(
        self, configuration: Configuration, repeats: int, phase: str
    ) -> Asking[tuple[int, int]]:
        """Raises BudgetSpent."""
        left = self.budget - self.trials
        if left <= 0:
            raise BudgetSpent
        failures, passes = yield Question(configuration, max(1, min(repeats, left)), phase)
        counts = self._counts.setdefault(configuration, [0, 0])
        counts[0] += failures
        counts[1] += passes
        self.trials += failures + passes
        return failures, passes

    def count(self, configuration: Configuration) -> tuple[int, int]:
        failures, passes = self._counts.get(configuration, (0, 0))
        return failures, passes

    def total(self, wanted: Callable[[Configuration], bool]) -> tuple[int, int]:
        """Failures and passes of all configurations that are wanted."""
        found = [counts for known, counts in self._counts.items() if wanted(known)]
        return sum(counts[0] for counts in found), sum(counts[1] for counts in found)


def decide(
    evidence: Evidence,
    configuration: Configuration,
    bad: Rate,
    good: Rate,
    *,
    delta: float,
    phase: str,
    least_failures: int = 0,
    give_up: float | None = None,
) -> Asking[float]:
    """The probability that a configuration fails with the rate `bad`: 1 - delta or more, with
    `least_failures` of its own; or at most `give_up`, or delta."""
    low = delta if give_up is None else give_up
    while True:
        failures, passes = evidence.count(configuration)
        probability = probability_bad(bad, good, failures, passes)
        if probability <= low:
            return probability
        sure = probability >= 1 - delta
        if sure and failures >= least_failures:
            return probability
        needed = 1
        while needed < MOST_PASSES and (
            probability_bad(bad, good, failures, passes + needed) > low
        ):
            needed += 1
        yield from evidence.ask(configuration, needed, phase)


def threshold(
    evidence: Evidence,
    search: ThresholdSearch,
    configuration: Callable[[int], Configuration],
    phase: str,
) -> Asking[Found]:
    """Takes what is known already into account. Raises Unnamed when the search ends without a
    threshold, BudgetSpent."""
    for m in range(search.n):  # all on: the prior of p tells it; nothing on: that of q
        known = configuration(m)
        if known.on:
            _tell(search, m, *evidence.count(known))
    while True:
        move = search.ask()
        if isinstance(move, Found):
            return move
        if isinstance(move, Inconclusive):
            raise Unnamed(move)
        failures, passes = yield from evidence.ask(configuration(move), search.repeats(move), phase)
        _tell(search, move, failures, passes)


def _tell(search: ThresholdSearch, m: int, failures: int, passes: int) -> None:
    for failed, repeats in ((True, failures), (False, passes)):
        if repeats:
            search.tell(m, failed, repeats)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a set is looked for in: all `steps`, `delayed` throughout."""

    steps: Sequence[str]
    delayed: frozenset[str]
    delta: float

    def with_on(self, on: Sequence[str] | frozenset[str]) -> Configuration:
        return Configuration(frozenset(on), self.delayed)


def find_set(
    evidence: Evidence,
    setting: Setting,
    candidate: Sequence[str],
    rates: Callable[[Sequence[str]], tuple[Rate, Rate]],
    watch: Callable[[ThresholdSearch, Sequence[str]], None],
    most: int | None = None,
) -> Asking[list[str]]:
    """A set of steps that fails on its own, of which each member was needed when it was found; of
    that, the first `most` to be found.

    `candidate` is believed to be part of it. `rates(fixed)` are p and q as they are known by now,
    `watch` is told of each search and of the steps that its thresholds mean. Raises Contradiction,
    Unnamed, BudgetSpent.
    """
    steps, fixed, limit = setting.steps, list(candidate), len(setting.steps)
    alone = ALONE if fixed else 0.0
    never = NEVER if fixed else 0.0
    while True:
        bad, good = rates(fixed)
        if not limit:
            probability = yield from decide(
                evidence, setting.with_on(fixed), bad, good, delta=setting.delta, phase="sets"
            )
            if probability < 0.5:
                raise Contradiction
            return fixed
        free = [float(step not in fixed) for step in steps[:limit]]
        share = (1 - alone - never) / max(1.0, sum(free))
        search = ThresholdSearch(
            limit,
            failures=bad.failures,
            trials=bad.failures + bad.passes,
            background=(good.failures, good.passes),
            delta=setting.delta,
            budget=UNBOUND,  # the evidence has one, for all searches together
            weights=[alone, *(share * weight for weight in free), never],
        )
        watch(search, steps[:limit])
        known = frozenset(fixed)

        def configuration(m: int, known: frozenset[str] = known) -> Configuration:
            return setting.with_on(known | {*steps[:m]})

        found = yield from threshold(evidence, search, configuration, "sets")
        if found.k == 0:
            return fixed
        if found.k > limit:
            raise Contradiction
        if len(fixed) == MOST_MEMBERS:
            first, last = search.interval()
            raise Unnamed(
                Inconclusive(
                    first, last, found.k, found.probability, search.trials,
                    f"it takes more than {MOST_MEMBERS} steps",
                )
            )  # fmt: skip
        fixed.append(steps[found.k - 1])
        if len(fixed) == most:
            return fixed
        limit, alone, never = found.k - 1, ALONE, NEVER


def minimal_set(
    evidence: Evidence,
    setting: Setting,
    members: Sequence[str],
    rates: Callable[[Sequence[str]], tuple[Rate, Rate]],
) -> Asking[tuple[list[str], float]]:
    """Drops members without which it still fails. Returns the rest, and the probability that each
    of it is needed. What the searches saw of larger sets does not count: had it been by chance, it
    would have led to this very set.

    One member is needed: with nothing on, nothing fails.
    """
    kept, needed = list(members), 1.0
    for member in members:
        if len(kept) < 2:
            break
        rest = frozenset(kept) - {member}
        bad, good = rates(kept)
        probability = yield from decide(
            evidence,
            setting.with_on(rest),
            bad,
            good,
            delta=setting.delta,
            phase="minimal",
        )
        if probability > 0.5:
            kept.remove(member)
        else:
            needed *= 1 - probability
    return kept, needed
