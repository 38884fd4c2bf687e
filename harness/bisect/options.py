"""Which options make an engine fail: the decisions of `harness bisect options`, free of any board.

0. With everything on it fails three times, with everything off it does not.
1. Sets: the smallest prefix of the list at which it fails gives one member; the next is looked for
   before it, with that one on; until the members fail alone.
2. Each member of a set is dropped again if the others fail without it.
3. With one member of the set off, and everything else on, it passes; where it still fails there is
   another, independent set.
A loss to which many options add a little has no such set: that is told, and they can be ranked
(harness.bisect.ranking).

What fails the same way with the same bits each time needs one run where a flaky failure needs many.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from harness.bisect.option_space import Space
from harness.bisect.option_verdicts import (
    Culprits,
    Outcome,
    Question,
    Verdict,
    contradiction,
    graded,
    half_as_often,
    named,
    together,
    unclear,
)
from harness.bisect.sets import Rate, probability_bad
from harness.bisect.threshold import BACKGROUND, Found, Inconclusive, ThresholdSearch
from harness.bisect.trials import Result, Trial

LEAST_P = 0.05  # failures that are rarer with everything on are not reproducible here
TARGET_FAILURES = 3
MOST_MEMBERS = 5  # of a set; more of them are a graded loss
MOST_SETS = 3
SAME_BITS = 5  # passes with the same bits that tell a deterministic engine from a lucky one
CERTAIN = 12  # failures or passes that one run of a deterministic engine stands for
NEVER = 0.02  # prior probability that what failed together does not beside what was found
PATIENCE = 3  # tries of a setting that cannot be judged (another failure, or it does not run)
MOST_RUNS = 500  # of one setting: rates that are not told apart by then are not told apart
PATIENT = 20  # times the passes that rule a failure out, for a member that may not be there
MOST_APART = 4  # trials with everything off for each one with everything on
MOST_TROUBLE = 5  # of board or link, one after the other


class _End(Exception):
    """Carries how the search ended, from wherever that was found."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.sentence)
        self.verdict = verdict


_Asking = Generator[Question, Trial, Any]


class OptionSearch:
    """Ask and tell. Deterministic: the same trials lead to the same questions.

    `signature` is the failure that is hunted; None: the first one that is seen with all options on.
    `least_p`: how rare it may be there. `budget`: trials in all.
    """

    def __init__(
        self,
        space: Space,
        *,
        delta: float = 0.01,
        budget: int = 2000,
        least_p: float = LEAST_P,
        signature: str | None = None,
    ) -> None:
        if not 0 < delta < 0.5 or not 0 < least_p <= 1 or budget < 1 or not len(space):
            raise ValueError(
                f"a search among {len(space)} options with delta {delta:g}, a least rate of "
                f"{least_p:g} and a budget of {budget}; expected at least one option, delta "
                "between 0 and 0.5, a rate between 0 and 1, a budget of at least 1"
            )
        self.space, self.delta, self.budget, self.signature = space, delta, budget, signature
        self.least_p, self.trials = least_p, 0
        self.threshold: ThresholdSearch | None = None  # the one that goes on, for showing
        self.among: tuple[str, ...] = ()  # the options that it searches
        self.posteriors: list[dict[str, float]] = []  # of each search that ended: option → share
        self._failures, self._full_trials = 0, 0
        # Failures and passes of settings that are known to hold a culprit, and of those that hold
        # none: from what was seen with everything on and off, and from each search that ended.
        self._bad, self._good = [0, 0], [0, 0]
        self._deterministic = False
        self._counts: dict[frozenset[str], list[int]] = {}  # setting → failures, passes
        self._search = self._run()
        self._verdict: Verdict | None = None
        self._question: Question | None = None
        self._advance(None)

    def ask(self) -> Question | Verdict:
        """The next run, or how the search ended."""
        if self._verdict is not None:
            return self._verdict
        if self._question is None:
            raise RuntimeError("the search neither asks nor has ended")
        return self._question

    def tell(self, trial: Trial) -> None:
        """The result of the run that was asked for."""
        if self._verdict is None:
            self.trials += trial.result is not Result.INFRA
            self._advance(trial)

    def shares(self) -> dict[str, float]:
        """The probability of each option that is searched now to be the next member of the set."""
        if self.threshold is None:
            return {}
        posterior = self.threshold.posterior()[1:]  # of the prefixes 1 … n, and of none
        return dict(zip(self.among, map(float, posterior), strict=False))

    def is_target(self, trial: Trial) -> bool:
        """Whether a trial ended in the failure that is hunted."""
        if trial.result is not Result.FAIL:
            return False
        return self.signature in (None, trial.signature)

    def _advance(self, trial: Trial | None) -> None:
        try:
            self._question = next(self._search) if trial is None else self._search.send(trial)
        except _End as end:
            self._verdict = end.verdict
        except StopIteration as stop:
            self._verdict = stop.value

    # --- one run, or as many as it takes -------------------------------------------------------

    def _once(self, phase: str, options: frozenset[str]) -> Generator[Question, Trial, Trial]:
        """A trial that is no trouble of board or link."""
        for _ in range(MOST_TROUBLE):
            if self.trials >= self.budget:
                raise self._spent()
            trial = yield Question(phase, options)
            if trial.result is not Result.INFRA:
                return trial
        raise _End(
            Verdict(
                Outcome.BOARD_LOST, f"{MOST_TROUBLE} times in a row the board could not be asked"
            )
        )

    def _judged(
        self, phase: str, options: frozenset[str]
    ) -> Generator[Question, Trial, bool | None]:
        """Whether one run fails; None when it cannot be judged, however often it is tried."""
        counts = self._counts.setdefault(options, [0, 0])
        if self._deterministic and any(counts):
            return counts[0] > 0
        for _ in range(PATIENCE):
            trial = yield from self._once(phase, options)
            if self.is_target(trial) or trial.result is Result.PASS:
                failed = trial.result is Result.FAIL
                counts[0 if failed else 1] += 1
                return failed
        return None

    def _fails(
        self, phase: str, options: frozenset[str]
    ) -> Generator[Question, Trial, bool | None]:
        """Whether it fails at the rate that was seen with everything on, and not at that of the
        background, with the asked confidence. None when that cannot be told."""
        bad = Rate(self._bad[0], self._bad[1])
        good = Rate(self._good[0], self._good[1], BACKGROUND)
        for _ in range(MOST_RUNS):
            failures, passes = self._counts.get(options, (0, 0))
            if self._deterministic and failures + passes:
                return failures > 0
            probability = probability_bad(bad, good, failures, passes)
            if not self.delta < probability < 1 - self.delta:
                return probability > 0.5
            if (yield from self._judged(phase, options)) is None:
                return None
        return None

    # --- the search ------------------------------------------------------------------------------

    def _run(self) -> Generator[Question, Trial, Verdict]:
        yield from self._validate()
        sets: list[Culprits] = []
        disable: list[str] = []
        left = self.space.names
        while len(sets) < MOST_SETS:
            found = yield from self._one_set(left, sets)
            if found is None:  # what failed once more may have been the background
                rest = self.space.without(disable)
                self._counts.pop(rest, None)
                if (yield from self._fails("without", rest)) is False:
                    return named(sets, disable[:-1], (disable[-1],))
                break
            sets.append(found)
            off = yield from self._enough_to_disable(found, disable)
            if off is not None:
                return named(sets, disable, off)
            # With any one of them off it still fails: another set does it as well. Members of this
            # one are put away, so that it is found.
            disable.append(found.options[-1])
            left = tuple(name for name in left if name in self.space.without(disable))
            if not left:
                break
        return Verdict(
            Outcome.INCONCLUSIVE,
            f"{' and '.join(together(one.options) for one in sets)} fail by themselves, and it "
            "still fails without any one of them",
            tuple(sets),
            suspects=left,
        )

    def _validate(self) -> _Asking:
        """Everything on fails, everything off does not."""
        full = frozenset(self.space.names)
        most = self._runs(self.least_p)
        bits: list[Any] = []
        others = 0  # other failures, which say nothing about the rate of this one
        while self._failures < TARGET_FAILURES:
            trial = yield from self._once("all on", full)
            if trial.result is Result.FAIL and self.signature is None:
                self.signature = trial.signature
            if not self.is_target(trial) and trial.result is not Result.PASS:
                others += 1
                if others >= most:
                    raise _End(
                        Verdict(
                            Outcome.NOT_REPRODUCED,
                            f"with every option on it fails in another way, {others} times: "
                            f"{trial.signature}",
                        )
                    )
                continue
            self._full_trials += 1
            self._failures += self.is_target(trial)
            bits.append(trial.evidence.get("hash"))
            same = None not in bits and len(set(bits)) == 1
            never = self._failures == 0 and same and len(bits) >= SAME_BITS
            if never or (self._failures == 0 and self._full_trials >= most):
                why = ", with the same bits each time" if never else ""
                raise _End(
                    Verdict(
                        Outcome.NOT_REPRODUCED,
                        f"it does not fail with every option on: 0 of {self._full_trials} runs"
                        + why,
                    )
                )
            if self._full_trials >= most * TARGET_FAILURES:
                raise _End(
                    Verdict(
                        Outcome.INCONCLUSIVE,
                        f"with every option on {self._failures} of {self._full_trials} runs fail: "
                        "too seldom to be searched",
                        suspects=self.space.names,
                    )
                )
        self._deterministic = self._failures == self._full_trials and same
        self._bad = [self._failures, self._full_trials - self._failures]
        self._counts[full] = list(self._bad)
        off: frozenset[str] = frozenset()
        always = yield from self._as_often(off)
        self._good = list(self._counts.get(off, [0, 0]))
        told = f"{self._good[0]} of {sum(self._good)} runs"
        if always is None:
            why = "fails in another way" if not sum(self._good) else f"fails in {told}"
            raise _End(
                Verdict(
                    Outcome.INCONCLUSIVE,
                    f"with every option off it {why}, so nothing can be compared",
                    suspects=self.space.names,
                )
            )
        if always:
            raise _End(
                Verdict(
                    Outcome.ALWAYS,
                    f"it fails with every option off as well ({told}): no option is to blame",
                )
            )

    def _as_often(self, off: frozenset[str]) -> Generator[Question, Trial, bool | None]:
        """Whether it fails at least half as often with everything off as with everything on."""
        full = frozenset(self.space.names)
        for _ in range(MOST_RUNS):
            known = self._counts.get(off, (0, 0))
            if self._deterministic and any(known):
                return known[0] > 0
            probability = half_as_often(self._bad, known)
            if not self.delta < probability < 1 - self.delta:
                return probability > 0.5
            if sum(known) < MOST_APART * sum(self._bad):
                failed = yield from self._judged("all off", off)
            else:  # how often it fails with everything on is what is known least
                failed = yield from self._judged("all on", full)
                self._bad = list(self._counts[full])
            if failed is None:
                return None
        return None

    def _one_set(
        self, left: Sequence[str], others: Sequence[Culprits]
    ) -> Generator[Question, Trial, Culprits | None]:
        """A minimal set of options among `left` that fails. None when, beside `others`, there is
        no other one."""
        members: list[str] = []
        beside: list[str] = []  # between two prefixes that can be run, before a member
        probability, limit = 1.0, len(left)
        for _ in range(MOST_MEMBERS):
            if limit == 0:
                raise _End(contradiction((), members))
            found = yield from self._prefix(left[:limit], members, certain=not (members or others))
            if found is None or found.last > limit:
                if members:
                    raise _End(contradiction(left[:limit], members))
                return None
            *others_there, last = left[found.first - 1 : found.last]
            members.append(last)
            beside += others_there
            probability *= found.probability
            limit = found.first - 1
            if (yield from self._fails("alone", self.space.closed(members))):
                for need in (name for name in others_there if name in self.space.closed([last])):
                    instead = [*members[:-1], need]  # which was on beside it
                    if (yield from self._fails("alone", self.space.closed(instead))):
                        members = instead
                        break
                break
            if others_there:  # it may take them too
                members += reversed(others_there)
                if (yield from self._fails("alone", self.space.closed(members))):
                    break
        else:
            raise _End(graded(MOST_MEMBERS, members, others))
        for name in list(members) if len(members) > 1 else ():
            rest = [other for other in members if other != name]
            if (yield from self._fails("minimal", self.space.closed(rest))):
                members = rest
        members.reverse()  # in the order of the list
        needed = sorted(self.space.closed(members) - set(members), key=self.space.names.index)
        beside = [name for name in beside if name not in members]
        return Culprits(tuple(members), tuple(needed), tuple(beside), probability)

    def _prefix(
        self, among: Sequence[str], members: Sequence[str], *, certain: bool
    ) -> Generator[Question, Trial, Found | None]:
        """The smallest prefix of `among` that fails together with `members`. Unless it is `certain`
        that there is one, it may lie behind the last, and is None when it takes too long: a rate
        like that of the background can be searched for ever."""
        allowed = set(range(len(among) + 1))
        told: list[tuple[int, bool, int]] = []
        self.among = tuple(among)
        never = 0.0 if certain else NEVER
        weights = [0.0, *[(1 - never) / len(among)] * len(among), never]
        while True:
            search = ThresholdSearch(
                len(among),
                failures=self._bad[0],
                trials=sum(self._bad),
                background=(self._good[0], self._good[1] * self._weight),
                delta=self.delta,
                allowed=allowed,
                weights=weights,
                # The whole search's budget is looked after elsewhere.
                budget=10**9 if certain else PATIENT * self._weight * self._runs(self._rate),
            )
            for answer in told:
                search.tell(*answer)
            self.threshold = search
            refused = None
            while refused is None:
                move = search.ask()
                if isinstance(move, (Found, Inconclusive)):
                    self.posteriors.append(self.shares())
                if isinstance(move, Found):
                    self.threshold = None
                    self._learn(move, told)
                    return move
                if isinstance(move, Inconclusive):
                    self.threshold = None
                    if certain:
                        raise _End(unclear(among, move))
                    return None
                options = self.space.closed([*among[:move], *members])
                for _ in range(1 if self._deterministic else search.repeats(move)):
                    failed = yield from self._judged("prefix", options)
                    if failed is None:
                        refused = move
                        break
                    told.append((move, failed, self._weight))
                    search.tell(*told[-1])
                    if failed:
                        break
            allowed.discard(refused)

    def _learn(self, found: Found, told: Sequence[tuple[int, bool, int]]) -> None:
        """Rates, from the settings of a search whose threshold is known now."""
        for m, failed, _ in told if not self._deterministic else ():
            if m >= found.last:
                self._bad[0 if failed else 1] += 1
            elif m < found.first:
                self._good[0 if failed else 1] += 1

    def _enough_to_disable(
        self, found: Culprits, already: Sequence[str]
    ) -> Generator[Question, Trial, tuple[str, ...] | None]:
        """What is enough to switch off for nothing to fail any more: one member, or, where the
        engine does not run without it alone, what lies beside it too. () when that cannot be told;
        None when it still fails whichever is off."""
        unclear = False
        for name in reversed(found.options):  # the one that fewest others need
            for off in dict.fromkeys(((name,), (*found.beside, name))):
                fails = yield from self._fails("without", self.space.without([*already, *off]))
                if fails is False:
                    return off
                if fails:
                    break
            else:
                unclear = True
        return () if unclear else None

    # --- numbers and words ---------------------------------------------------------------------

    @property
    def _weight(self) -> int:
        return CERTAIN if self._deterministic else 1

    @property
    def _rate(self) -> float:
        """Of failures with a culprit on."""
        return Rate(self._bad[0], self._bad[1]).mean

    def _runs(self, rate: float) -> int:
        """Passes after which a failure of this rate is out of the question: ⌈ln(1/δ) / rate⌉."""
        return math.ceil(math.log(1 / self.delta) / rate)

    def _spent(self) -> _End:
        left = self.among if self.threshold is not None else self.space.names
        return _End(
            Verdict(
                Outcome.INCONCLUSIVE,
                f"the budget of {self.budget} trials is spent",
                suspects=tuple(left),
            )
        )
