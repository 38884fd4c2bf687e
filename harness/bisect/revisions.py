"""Which revision broke it: crashes, wrong results and failing tests, certain or flaky.

    bad      until it has failed three times with one signature; that is what is hunted
    good     passes often enough that it is not merely lucky, or the search ends here
    search   the noisy threshold search over the line; a build that cannot be tested, or that fails
             in another way each time, is left out, and stays nameable together with its successor
    verify   fresh trials of the named revision and of its parent

Pure: the same answers give the same questions.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
from scipy.stats import fisher_exact

from harness.bisect.lines import Answer, Line, Outcome, Question
from harness.bisect.threshold import SIGMA, Found, Inconclusive, ThresholdSearch
from harness.bisect.trials import Result

LEAST_RATE, SURE_RATE = 0.2, 0.5  # of a bad revision's failures: that may be luck, that are not
FAILURES = 3  # of the bad revision, before anything else
OTHERS = 3  # failures of another kind, and none that count: the build is left out
MOST_VERIFYING = 60  # passes of the parent
# Rates from 1 down to the least are this many standard deviations of the prior of log p.
RATES = 2.6
EARLY = 6.0  # times delta: the search hands over to the fresh trials, which settle the rest
# Where the failure is rare, its rate is a guess, and a name hangs on it: half the risk, and a rate
# that is lower by so much.
CAREFUL_RISK, CAREFUL_RATE = 0.5, 0.7


@dataclasses.dataclass(frozen=True)
class Settings:
    """A name is wrong with a probability of at most `delta`. Failures of the bad revision that are
    rarer than `least_rate` are not looked for. `budget` is in trials. The bad revision has to fail
    `failures` times: one will do where the failure is known already."""

    delta: float = 0.01
    least_rate: float = LEAST_RATE
    budget: int = 400
    failures: int = FAILURES

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 0.5 or not 0.0 < self.least_rate <= 1.0 or self.budget < 8:
            raise ValueError(
                f"delta {self.delta}, least rate {self.least_rate}, budget {self.budget}; expected "
                "delta below 0.5, a rate up to 1, a budget of at least 8"
            )


@dataclasses.dataclass
class _Seen:
    """What trials of one build gave."""

    fails: int = 0
    passes: int = 0
    others: int = 0

    @property
    def told(self) -> int:
        return self.fails + self.passes


class FailureSearch:
    """Ask and tell over a line. `signature` is the failure that is hunted; without one it is the
    first that the bad revision shows."""

    def __init__(
        self, line: Line, settings: Settings | None = None, signature: str | None = None
    ) -> None:
        self.line, self.settings, self.signature = line, settings or Settings(), signature
        self._seen: dict[int, _Seen] = {}  # by canonical position
        self._ends: tuple[tuple[int, int], tuple[int, int]] | None = None  # bad, good: (f, told)
        self._threshold: ThresholdSearch | None = None
        self._told: list[tuple[int, bool]] = []  # after the ends: what the threshold search knows
        self._named: Found | None = None
        self._fresh: Counter[tuple[int, bool]] = Counter()  # (1 named or 0 parent, failed)
        self._trials = 0
        self._other_signatures: Counter[str] = Counter()

    # --- asking -------------------------------------------------------------------------------

    def ask(self) -> Question | Answer:
        """The next trial, or the end."""
        if self.line.same_ends:
            return Answer(
                Outcome.SAME_BUILD,
                "the good and the bad revision are the same build: what differs between them does "
                "not run on a board",
            )
        if not self.line.testable(self.line.last):
            return Answer(Outcome.UNTESTABLE, "the bad revision" + self._why_not())
        if not self.line.testable(0):
            return Answer(Outcome.UNTESTABLE, "the good revision" + self._why_not())
        if self._ends is None:
            asked = self._ask_ends()
            if asked is not None:
                return asked
        if not self.line.candidates():
            return Answer(
                Outcome.INCONCLUSIVE,
                "every revision between has a build that occurs on both sides of it",
            )
        threshold = self._search()
        move = threshold.ask()
        if isinstance(move, Found):
            return self._verify(move)
        self._named = None
        if isinstance(move, Inconclusive):
            inside = tuple(
                at
                for candidate in self.line.candidates()
                if move.first <= candidate.last <= move.last
                for at in candidate.positions
            )
            return Answer(Outcome.INCONCLUSIVE, move.reason, inside, 1.0 - self.settings.delta)
        if self._trials >= self.settings.budget:
            first, last = threshold.interval()
            return Answer(
                Outcome.INCONCLUSIVE,
                f"the budget of {self.settings.budget} trials is spent",
                tuple(range(max(first, 1), last + 1)),
                1.0 - self.settings.delta,
            )
        return Question(move, "search")

    def _ask_ends(self) -> Question | Answer | None:
        if self._trials >= self.settings.budget:
            return Answer(
                Outcome.INCONCLUSIVE,
                f"the budget of {self.settings.budget} trials is spent before both ends are known",
            )
        bad = self._of(self.line.last)
        if bad.fails < self.settings.failures:
            rare = self.settings.least_rate
            enough = self._passes(rare)
            if bad.fails == 0 and bad.passes >= enough:
                return Answer(
                    Outcome.BAD_PASSES,
                    f"the bad revision passed {bad.passes} of {bad.passes} trials: it does not "
                    f"fail, or more rarely than {rare:.0%} of the time",
                    confidence=1.0 - self.settings.delta,
                )
            if bad.told >= max(self.settings.budget // 2, 3 * enough):
                return Answer(
                    Outcome.BAD_PASSES,
                    f"the bad revision failed {bad.fails} of {bad.told} trials, too rarely to be "
                    "told from a good one",
                )
            return Question(self.line.last, "bad")
        good, wanted = self._of(0), self._good_wanted(bad)
        rate = bad.fails / bad.told
        lost = good.fails >= 2 and good.fails >= 0.5 * rate * good.told
        if lost or (good.told >= wanted and good.fails > 0.5 * rate * good.told):
            return Answer(
                Outcome.GOOD_FAILS,
                f"the good revision failed {good.fails} of {good.told} trials in the same way, the "
                f"bad one {bad.fails} of {bad.told}",
            )
        if good.told < wanted * (1 if good.fails == 0 else 3):
            return Question(0, "good")
        self._ends = ((bad.fails, bad.told), (good.fails, good.told))
        return None

    def _good_wanted(self, bad: _Seen) -> int:
        """Trials after which a revision as bad as that one would have failed."""
        return self._passes(bad.fails / bad.told)

    def _passes(self, rate: float) -> int:
        """Passes in a row that a revision which fails at this rate shows with probability delta."""
        # No failure is taken to be certain; deltas that are powers of ten come out even.
        return max(2, math.ceil(math.log(self.settings.delta) / math.log1p(-min(rate, 0.9)) - 1e-9))

    def _search(self) -> ThresholdSearch:
        """The threshold search over what can be tested now, told all that is known."""
        if self._threshold is None:
            (failures, trials), (good_failures, good_trials) = self._ends or ((3, 3), (0, 0))
            last = self.line.last
            weights = [0.0] * (last + 2)
            for candidate in self.line.candidates():
                for at in candidate.positions:
                    weights[at] = 1.0
            canonical = {
                self.line.canonical(at) for at in range(last + 1) if self.line.testable(at)
            }
            self._threshold = ThresholdSearch(
                last,
                # Trials ended with a failure, so f / n is too much (J. Haldane, "On a method of
                # estimating frequencies", Biometrika 33, 1945).
                failures=failures - 1 if failures > 1 else failures,
                trials=trials - 1 if failures > 1 else trials,
                background=(good_failures, good_trials - good_failures),
                delta=min(EARLY * self.settings.delta, 0.4),
                weights=weights,
                allowed=canonical,
                sigma=min(SIGMA, math.log(1.0 / self.settings.least_rate) / RATES),
            )
            for position, failed in self._told:
                self._threshold.tell(position, failed)
        return self._threshold

    def _verify(self, found: Found) -> Question | Answer:
        """Fresh trials of both sides; the threshold search is told them too and may change its
        mind, then the search goes on."""
        if self._named is None or self._named.last != found.last:
            self._fresh.clear()
        self._named = found
        parent = self._of(found.first - 1)
        rare = any(seen.passes for position, seen in self._seen.items() if position >= found.last)
        wanted = self._passes(self._search().rate * (CAREFUL_RATE if rare else 1.0))
        wanted = min(MOST_VERIFYING, wanted)
        risk = self.settings.delta * (CAREFUL_RISK if rare else 1.0)
        fresh = {side: self._fresh[side, True] + self._fresh[side, False] for side in (0, 1)}
        confirmed = self._fresh[1, True] > 0
        sure = found.probability >= 1.0 - risk and self._apart(found) <= self.settings.delta
        if sure and confirmed and fresh[0] >= 1 and parent.passes >= wanted:
            return self._name(found)
        if not confirmed and fresh[1] >= 2 * wanted:
            return Answer(
                Outcome.UNVERIFIED,
                f"the search names it, but it passed {fresh[1]} further trials",
                self._positions(found),
                found.probability,
            )
        if min(fresh.values()) >= 2 * wanted and self._apart(found) > self.settings.delta:
            return Answer(
                Outcome.UNVERIFIED,
                "the search names it, but without it the failure is about as frequent",
                self._positions(found),
                found.probability,
            )
        if self._trials >= self.settings.budget + MOST_VERIFYING:
            return Answer(
                Outcome.UNVERIFIED,
                f"the search names it; the budget of {self.settings.budget} trials is spent",
                self._positions(found),
                found.probability,
            )
        side = 0 if confirmed and parent.passes < wanted else int(fresh[1] <= fresh[0])
        return Question(found.last if side else found.first - 1, "verify")

    def _apart(self, found: Found) -> float:
        """How likely so different rates of failure before and after it are by chance alone, by
        Fisher's exact test over all trials: the threshold search takes background failures for
        rare."""
        before, after = [0, 0], [0, 0]
        for position, seen in self._seen.items():
            side = after if position >= found.last else before
            side[0] += seen.fails
            side[1] += seen.passes
        return float(fisher_exact(np.array([after, before]), alternative="greater").pvalue)

    def _name(self, found: Found) -> Answer:
        culprit, parent = self._of(found.last), self._of(found.first - 1)
        tallies = (
            f"it failed {culprit.fails} of {culprit.told} trials, its parent {parent.fails} of "
            f"{parent.told}"
        )
        positions = self._positions(found)
        details = {"trials": self._trials, "rate": self._search().rate}
        if len(positions) > 1:
            return Answer(
                Outcome.RANGE,
                f"one of {len(positions)} revisions, of which only the last can be tested: "
                + tallies,
                positions,
                found.probability,
                details,
            )
        return Answer(Outcome.NAMED, tallies, positions, found.probability, details)

    def _positions(self, found: Found) -> tuple[int, ...]:
        for candidate in self.line.candidates():
            if candidate.last == found.last:
                return candidate.positions
        return tuple(range(found.first, found.last + 1))

    def posterior(self) -> dict[int, float]:
        """Position → the probability that it is to blame; nothing before the ends are known."""
        if self._ends is None or not self.line.candidates():
            return {}
        weights = self._search().posterior()
        return {at: float(weights[at]) for one in self.line.candidates() for at in one.positions}

    @property
    def rate(self) -> float:
        """How often a bad revision is expected to fail."""
        return self._search().rate if self._ends is not None else self.settings.least_rate

    # --- telling ------------------------------------------------------------------------------

    def tell(self, question: Question, result: Result, signature: str | None = None) -> Result:
        """How a trial ended; what it counts as is returned: a failure with another signature than
        the hunted one is OTHER. Raises ValueError for INFRA, which is not to be told."""
        if result is Result.INFRA:
            raise ValueError("a trial that did not take place tells nothing")
        position = self.line.canonical(question.position)
        seen = self._seen.setdefault(position, _Seen())
        self._trials += 1
        if result is Result.FAIL and self.signature is None and question.phase == "bad":
            self.signature = signature
        if result is Result.FAIL and self.signature not in (None, signature):
            result = Result.OTHER
        if result is Result.OTHER:
            self._other_signatures[signature or "another failure"] += 1
            seen.others += 1
            if seen.told == 0 and seen.others >= OTHERS:
                self.untestable(question.position)
            return result
        failed = result is Result.FAIL
        seen.fails += failed
        seen.passes += not failed
        if question.phase not in ("bad", "good"):
            self._told.append((position, failed))
            if self._threshold is not None:
                self._threshold.tell(position, failed)
        if question.phase == "verify" and self._named is not None:
            self._fresh[int(question.position >= self._named.last), failed] += 1
        return result

    def untestable(self, position: int) -> None:
        """The build at `position` cannot be tested."""
        self.line.exclude(position)
        self._threshold, self._named = None, None

    def _of(self, position: int) -> _Seen:
        return self._seen.get(self.line.canonical(position), _Seen())

    def _why_not(self) -> str:
        if self._other_signatures:
            name, count = self._other_signatures.most_common(1)[0]
            return f" fails in another way than the one that is hunted: {name} ({count} times)"
        return " cannot be tested"
