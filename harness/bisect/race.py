"""The search for a race: which steps, run asynchronously, make a decode go wrong?

A pure machine that is asked for the next configuration and told how its trials ended. A
configuration is the set of steps that run asynchronously, and of those whose results are held back.

    0 validate   everything asynchronous fails at least three times, everything synchronous passes
    1 static     a missing edge in the schedule itself is reported without a trial
    2 delays     holding results back makes a race frequent: whose result has to be late?
    3 sets       which steps have to be asynchronous for it, one after the other
    4 minimal    does it take each of them?
    5 confirm    they alone fail, all others pass; or there is a second race, to be looked for

Nothing is named that was not seen to fail on its own, and to pass without each of its members, by a
posterior of 1 - delta each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum

from harness.bisect.sets import (
    MOST_PASSES,
    SURE_FAILURES,
    Asking,
    BudgetSpent,
    Configuration,
    Contradiction,
    Evidence,
    Question,
    Rate,
    Setting,
    Unnamed,
    decide,
    find_set,
    minimal_set,
    probability_bad,
    threshold,
)
from harness.bisect.threshold import BACKGROUND, Floats, ThresholdSearch
from harness.bisect.trials import Result

LEAST_P = 0.05  # a race that fails more seldom is not looked for
SEARCH_DELTA = 0.1  # of tests in between
# Of searches: what they name is tested on its own afterwards, and looked for again if it passes.
GUESS_DELTA, SEARCH_DELTAS = 0.3, (0.1, 0.02)
GIVE_UP = 0.1  # probability that a guess is right, at which it is given up
RAISED_P = 0.2  # what delays have to raise a race to, to be of use
RAISE_TRIALS = 12  # without a failure, delays are of no use
DELAY_DELTA = 0.03  # of the search for the delay that matters
WHICH_DELAY = 80  # trials to find whose delay matters
UNDELAYED = (0.5, 5.0)  # pseudo-counts: without the delay that matters, it fails now and then
NO_DELAY = 0.1  # prior probability that it is as frequent without delays
MOST_BACKGROUND, ALIKE = 0.4, 0.75  # q / p: at most, to search; from here on, the same failure
LEAST_PATIENCE = 50  # trials of everything synchronous, before q is called too high
MOST_RACES = 3
MOST_OTHER = 10  # failures of another kind, before it is called another failure
MOST_INFRA = 5  # in a row


class Outcome(StrEnum):
    """How a search ended."""

    NAMED = "named"
    STATIC = "static-finding"
    INCONCLUSIVE = "inconclusive"
    NOT_REPRODUCED = "not-reproduced"  # asynchronous, it does not fail either
    NOT_A_RACE = "not-a-race"  # synchronous, it fails as well
    BACKGROUND = "background-too-high"  # q is too close to p, or above
    CHANGED = "changed-failure"  # mostly another failure than the first one
    BOARD_LOST = "board-lost"


@dataclasses.dataclass(frozen=True)
class Race:
    """Steps that fail when all of them are asynchronous, with `delayed` held back.

    alone, without: failures and trials of these steps alone, and of all others.
    """

    steps: tuple[str, ...]
    delayed: tuple[str, ...]
    probability: float
    alone: tuple[int, int]
    without: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`races` are named with the asked confidence, whatever the outcome of what came after them.
    `interval` are the steps among which the threshold lies that could not be told."""

    outcome: Outcome
    reason: str
    races: tuple[Race, ...] = ()
    interval: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


class _End(Exception):
    """An outcome that ends the search from anywhere in it."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


class RaceSearch:
    """Ask and tell. Deterministic: told the same results, it asks the same questions.

    steps: what can be asynchronous, in program order.
    delta: error probability of each test that a name rests on.
    budget: trials.
    delays: whether results may be held back, to make a race frequent.
    findings: what the static check found; then nothing is tried.
    """

    def __init__(
        self,
        steps: Sequence[str],
        *,
        delta: float = 0.01,
        budget: int = 2000,
        delays: bool = True,
        findings: Sequence[str] = (),
    ) -> None:
        if len(set(steps)) != len(steps) or not steps:
            raise ValueError(f"{len(steps)} steps, expected at least one, each of them once")
        if not 0 < delta < 0.5 or budget < 1:
            raise ValueError(f"delta {delta:g} and a budget of {budget}; expected 0 to 0.5, from 1")
        self.steps, self.delta, self.delays = tuple(steps), delta, delays
        self._findings = tuple(findings)
        self._universe = frozenset(steps)  # what is not named yet
        self._enough = math.ceil(math.log(delta) / math.log1p(-LEAST_P))  # passes that rule it out
        # That a race does not show is said with more care: nothing that follows would correct it.
        self._patience = math.ceil(math.log(delta / 4) / math.log1p(-LEAST_P))
        self._evidence = Evidence(budget)
        self._searching: tuple[ThresholdSearch, tuple[str, ...]] | None = None
        self._searched: tuple[ThresholdSearch, tuple[str, ...]] | None = None  # the last of them
        self._races: list[Race] = []
        self._signature: str | None = None
        self._others = self._infra = 0
        self._told = [0, 0]  # of the question that stands
        self._verdict: Verdict | None = None
        self._question: Question | None = None
        self._machine = self._search()
        self._advance(None)

    @property
    def trials(self) -> int:
        """That were told and count, the present question's included."""
        return self._evidence.trials + sum(self._told) + self._others

    @property
    def signature(self) -> str | None:
        """Of the failure that is looked for: the first that everything asynchronous led to."""
        return self._signature

    def ask(self) -> Question | Verdict:
        """The question that stands, with the repeats that are left of it; or how it ended."""
        if self._verdict is not None or self._question is None:
            return self._verdict or Verdict(Outcome.INCONCLUSIVE, "nothing was asked")
        left = self._question.repeats - sum(self._told)
        return dataclasses.replace(self._question, repeats=left)

    def tell(self, result: Result, signature: str | None = None) -> None:
        """How one trial of the present question ended. Raises ValueError when there is none."""
        if self._verdict is not None or self._question is None:
            raise ValueError("the search is over: it asked for no trial")
        if result is Result.INFRA:
            self._infra += 1
            if self._infra >= MOST_INFRA:
                self._close(Outcome.BOARD_LOST, f"{self._infra} trials in a row found no board")
            return
        self._infra = 0
        if result is Result.FAIL:
            self._signature = self._signature if self._signature is not None else signature
            if signature != self._signature:
                result = Result.OTHER
        if result is Result.OTHER:
            self._others += 1
            if self._others >= MOST_OTHER and 2 * self._others > self.trials:
                self._close(
                    Outcome.CHANGED,
                    f"{self._others} of {self.trials} trials failed otherwise than the first "
                    f"({self._signature or 'none failed as asked'})",
                )
            return
        self._told[0 if result is Result.FAIL else 1] += 1
        if result is Result.FAIL or sum(self._told) >= self._question.repeats:
            failures, passes = self._told
            self._told = [0, 0]
            self._advance((failures, passes))

    def posterior(self, *, ended: bool = False) -> tuple[tuple[str, ...], Floats] | None:
        """Steps of the search that goes on, and how probable each is its threshold; with `ended`
        those of the last one, though it has ended."""
        known = self._searched if ended else self._searching
        if known is None:
            return None
        search, steps = known
        return steps, search.posterior()[1:-1]

    def named(self) -> tuple[Race, ...]:
        """Races that were named so far."""
        return tuple(self._races)

    def _advance(self, answer: tuple[int, int] | None) -> None:
        try:
            self._question = next(self._machine) if answer is None else self._machine.send(answer)
        except StopIteration as end:
            self._verdict, self._question = end.value, None

    def _close(self, outcome: Outcome, reason: str) -> None:
        self._machine.close()
        self._verdict, self._question = self._ended(outcome, reason), None

    def _ended(self, outcome: Outcome, reason: str) -> Verdict:
        interval: tuple[str, ...] = ()
        if outcome is Outcome.INCONCLUSIVE and self._searching is not None:
            search, steps = self._searching
            first, last = search.interval()
            interval = tuple(steps[max(0, first - 1) : last])
        return Verdict(
            Outcome.NAMED if self._races else outcome, reason, tuple(self._races), interval
        )

    def _search(self) -> Asking[Verdict]:
        if self._findings:
            return Verdict(
                Outcome.STATIC, "the schedule itself lacks an edge", findings=self._findings
            )
        try:
            return (yield from self._races_of(list(self.steps)))
        except _End as end:
            return self._ended(end.outcome, end.reason)
        except BudgetSpent:
            budget = self._evidence.budget
            return self._ended(Outcome.INCONCLUSIVE, f"the budget of {budget} trials is spent")
        except Unnamed as unnamed:
            return self._ended(Outcome.INCONCLUSIVE, unnamed.end.reason)

    def _races_of(self, steps: list[str]) -> Asking[Verdict]:
        often = yield from self._often(steps)
        raised = not often and self.delays and (yield from self._raises(steps, frozenset(steps)))
        if not raised:
            yield from self._reproduce(steps)
        bad = self._bad(steps, frozenset(steps if raised else ()))
        yield from self._require_clean(bad, self._enough, SEARCH_DELTA)
        for _ in range(MOST_RACES):
            race = yield from self._race(steps, raised)
            rest = [step for step in steps if step not in race.steps]
            fails, without = yield from self._second(race, rest, raised)
            self._searching = None
            bad = self._bad(race.steps, frozenset(race.delayed))
            # What passes with all others on passes with nothing on.
            implied = without[1] if not without[0] else 0
            yield from self._require_clean(bad, MOST_PASSES, self.delta, implied)
            self._races.append(dataclasses.replace(race, without=without))
            if not fails:
                return self._ended(Outcome.NAMED, "")
            steps, self._universe = rest, frozenset(rest)
        return self._ended(Outcome.NAMED, f"there are more than {MOST_RACES} races")

    def _often(self, steps: Sequence[str]) -> Asking[bool]:
        """Whether it fails as it is more often than it passes: then no delay is needed."""
        everything = Configuration(frozenset(steps))
        while True:
            failures, passes = self._evidence.count(everything)
            if SURE_FAILURES in (failures, passes):
                return failures > passes
            yield from self._evidence.ask(everything, SURE_FAILURES - passes, "validate")

    def _raises(self, steps: Sequence[str], delayed: frozenset[str]) -> Asking[bool]:
        """Whether it fails often with `delayed` held back."""
        everything = Configuration(frozenset(steps), delayed)
        while True:
            failures, passes = self._evidence.count(everything)
            if failures >= SURE_FAILURES:
                return failures >= RAISED_P * (failures + passes)
            if passes >= RAISE_TRIALS and failures < RAISED_P * (failures + passes):
                return False
            yield from self._evidence.ask(everything, RAISE_TRIALS, "validate")

    def _reproduce(self, steps: Sequence[str]) -> Asking[None]:
        """Everything asynchronous, until it has failed three times."""
        everything = Configuration(frozenset(steps))
        most = self._patience
        while True:
            failures, passes = self._evidence.count(everything)
            if failures >= SURE_FAILURES:
                return
            if passes >= most * (failures + 1):
                raise _End(
                    Outcome.NOT_REPRODUCED,
                    f"everything asynchronous failed {failures} times in {failures + passes}; "
                    f"a race that shows in {LEAST_P:.0%} of the trials would have shown more often",
                )
            yield from self._evidence.ask(everything, most * (failures + 1) - passes, "validate")

    def _require_clean(self, bad: Rate, most: int, delta: float, implied: int = 0) -> Asking[None]:
        """Everything synchronous passes, so often that the rate `bad` would have shown in it and in
        the `implied` passes, or `most` times."""
        nothing, unknown = Configuration(frozenset()), Rate(0, 0, BACKGROUND)
        enough = min(most, bad.passes_until(delta))
        needed, patience = max(1, enough - implied), max(LEAST_PATIENCE, 2 * enough)
        while True:
            failures, passes = self._evidence.count(nothing)
            good = Rate(failures, passes, BACKGROUND)
            as_bad = probability_bad(bad, unknown, failures, passes)
            told = (
                f"everything synchronous failed {failures} times in {failures + passes}, "
                f"{bad.mean:.1%} of the asynchronous trials did"
            )
            if failures == 0 and passes >= needed:
                return
            if failures and as_bad <= delta and good.mean < MOST_BACKGROUND * bad.mean:
                return
            if failures >= SURE_FAILURES and as_bad >= 1 - SEARCH_DELTA:
                raise _End(Outcome.NOT_A_RACE, f"{told}: look for it with accuracy or triage")
            if failures and failures + passes >= patience:
                if good.mean >= ALIKE * bad.mean:
                    raise _End(Outcome.NOT_A_RACE, f"{told}: look for it with accuracy or triage")
                raise _End(Outcome.BACKGROUND, f"{told}: too close to be told apart")
            left = needed - passes if not failures else patience - failures - passes
            yield from self._evidence.ask(nothing, max(1, left), "validate")

    def _race(self, steps: Sequence[str], raised: bool) -> Asking[Race]:
        """One race in `steps`, tested on its own."""
        attempts: list[tuple[list[str], frozenset[str]]] = []
        if raised:
            attempts += [(yield from self._whose_delay(steps)), ([], frozenset(steps))]
        for candidate, delayed in attempts:
            try:
                return (yield from self._set(steps, candidate, delayed))
            except Contradiction:
                continue
        yield from self._reproduce(steps)  # without delays
        try:
            return (yield from self._set(steps, [], frozenset()))
        except Contradiction:
            raise _End(
                Outcome.INCONCLUSIVE,
                "what fails with everything asynchronous passes with any part of it: some step "
                "hides the race when it is asynchronous too",
            ) from None

    def _whose_delay(self, steps: Sequence[str]) -> Asking[tuple[list[str], frozenset[str]]]:
        """The step whose late result matters, and what to hold back from now on."""
        everything = frozenset(steps)
        bad = self._bad(steps, everything)
        search = ThresholdSearch(
            len(steps),
            failures=bad.failures,
            trials=bad.failures + bad.passes,
            delta=DELAY_DELTA,
            budget=min(WHICH_DELAY, self._evidence.budget - self._evidence.trials),
            weights=[NO_DELAY, *[(1 - NO_DELAY) / len(steps)] * len(steps), 0.0],
            background_prior=UNDELAYED,
        )
        self._watch(search, steps)

        def configuration(m: int) -> Configuration:
            return Configuration(everything, frozenset(steps[:m]))

        try:
            found = yield from threshold(self._evidence, search, configuration, "delays")
        except Unnamed:
            return [], everything
        if found.k == 0:
            often = yield from self._raises(steps, frozenset())
            return [], frozenset() if often else everything
        return [steps[found.k - 1]], frozenset({steps[found.k - 1]})

    def _set(
        self, steps: Sequence[str], candidate: Sequence[str], delayed: frozenset[str]
    ) -> Asking[Race]:
        """First the likeliest step alone, as soon as there is one: most races take no more. Then
        sets, found with more care each time."""

        def rates(fixed: Sequence[str]) -> tuple[Rate, Rate]:
            return self._bad(fixed or steps, delayed), self._good(fixed)

        setting = Setting(steps, delayed, GUESS_DELTA)
        members, needed = list(candidate), 1.0
        if not members:
            members = yield from find_set(
                self._evidence, setting, members, rates, self._watch, most=1
            )
        alone = yield from self._alone(setting.with_on(members), give_up=GIVE_UP)
        if alone < 0.5 and delayed and not (yield from self._raises(steps, delayed)):
            raise Contradiction  # it was not this delay that made it frequent
        for delta in SEARCH_DELTAS:
            if alone >= 0.5:
                break
            with contextlib.suppress(Contradiction):
                setting = dataclasses.replace(setting, delta=delta)
                members = yield from find_set(
                    self._evidence, setting, candidate, rates, self._watch
                )
                # Two tests of it and more, and all have to be right.
                sure = dataclasses.replace(setting, delta=self.delta / 3)
                members, needed = yield from minimal_set(self._evidence, sure, members, rates)
                alone = yield from self._alone(setting.with_on(members))
        if alone < 0.5:
            raise Contradiction
        failures, passes = self._evidence.count(setting.with_on(members))
        order = {step: at for at, step in enumerate(self.steps)}
        return Race(
            tuple(sorted(members, key=order.__getitem__)),
            tuple(sorted(delayed, key=order.__getitem__)),
            alone * needed,
            (failures, failures + passes),
            (0, 0),
        )

    def _alone(self, members: Configuration, give_up: float | None = None) -> Asking[float]:
        """The probability that these steps fail on their own."""
        bad = self._bad(tuple(members.on), members.delayed, but=members)
        return (
            yield from decide(
                self._evidence,
                members,
                bad,
                self._good(tuple(members.on)),
                delta=self.delta,
                phase="confirm",
                least_failures=SURE_FAILURES,
                give_up=give_up,
            )
        )

    def _second(
        self, race: Race, rest: Sequence[str], raised: bool
    ) -> Asking[tuple[bool, tuple[int, int]]]:
        """Whether all other steps fail without those that were named: failures and trials."""
        if not rest:
            return False, (0, 0)
        delayed = frozenset(rest) if raised else frozenset()
        others = Configuration(frozenset(rest), delayed)
        bad = self._bad(race.steps, frozenset(race.delayed))
        probability = yield from decide(
            self._evidence,
            others,
            bad,
            self._good(race.steps, but=others),
            delta=self.delta,
            phase="confirm",
        )
        failures, passes = self._evidence.count(others)
        return probability > 0.5, (failures, failures + passes)

    def _bad(
        self,
        fixed: Sequence[str],
        delayed: frozenset[str],
        but: Configuration | None = None,
    ) -> Rate:
        """How often what holds all of `fixed` has failed with `delayed` held back, or more if that
        was hardly tried."""
        on, universe = frozenset(fixed), self._universe

        def holds(known: Configuration) -> bool:
            return known != but and on <= known.on <= universe and known.delayed >= delayed

        failures, passes = self._evidence.total(
            lambda known: holds(known) and known.delayed == delayed
        )
        if failures < SURE_FAILURES:
            failures, passes = self._evidence.total(holds)
        return Rate(failures, passes)

    def _good(self, fixed: Sequence[str], but: Configuration | None = None) -> Rate:
        """How often what lacks one of `fixed` has failed; without any, everything synchronous."""
        on, universe = frozenset(fixed), self._universe

        def lacks(known: Configuration) -> bool:
            return known != but and known.on <= universe and (not known.on or not on <= known.on)

        if not on:
            return Rate(*self._evidence.count(Configuration(frozenset())), BACKGROUND)
        return Rate(*self._evidence.total(lacks), BACKGROUND)

    def _watch(self, search: ThresholdSearch, steps: Sequence[str]) -> None:
        self._searching = self._searched = (search, tuple(steps))
