"""Which revision made it slower (or larger): Bayes over change points, one value per visit.

A visit is a fresh deployment and a fresh process. Repeats within a visit share its luck (memory
layout, placement, temperature), so they are one value, whose variance is between² + within² /
repeats. A search that takes repeats for independent is sure of the wrong revision.

The model of the log values y, with x = 1 from the change on:

    y = level + walk + effect · x + noise(between² + within² / repeats)

level flat; effect log-uniform from the least that counts to a factor of e; between lognormal. The
walk is what a board does by itself while hours pass (heat, neighbours): from visit to visit it goes
a normal step, none or a share of the noise. All but the level, which integrates out, is summed over
a grid, so the posterior over change points, "no change" among them, needs no approximation and no
starting guess. R. Adams and D. MacKay,
"Bayesian online changepoint detection" (2007) have the idea, with many changes.

    ends     good and bad in ABBA order until it is clear that they differ, or that they do not
    search   the candidate that halves the posterior; each fifth visit goes to the good revision.
             When that one is off by more than three sigma from the visits of it before, and again
             at once: ENVIRONMENT
    verify   the named revision against its parent, ABBA, in fresh visits alone

Pure: the same seed and the same answers give the same questions.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy import linalg, stats
from scipy.special import logsumexp

from harness.bisect.lines import Answer, Candidate, Line, Outcome, Question

Array = npt.NDArray[np.float64]

GOOD_EVERY = 5  # visits
DRIFT_SIGMAS = 3.0
BLOCKS = 8  # of ABBA to verify, at most; one of them, four visits, at least
NO_CHANGE = 0.5  # prior: that the two ends do not differ at all
MAX_EFFECT = 1.0  # log: a factor of e; larger ones are found all the same
EFFECTS, BETWEENS = 24, 17  # points of the grid
WALKS = (0.0, 0.15, 0.4, 1.0)  # steps of the board's own, in standard deviations of a visit
STILL = 0.5  # prior: that it stands still
LATELY = 4  # visits of the good revision that a new one is held against
ABBA = (0, 1, 1, 0)
LOG_PRIOR_WALK = np.log([STILL, *[(1.0 - STILL) / (len(WALKS) - 1)] * (len(WALKS) - 1)])


@dataclasses.dataclass(frozen=True)
class Settings:
    """`confidence` that a name is right. `least` is the smallest ratio - 1 that counts; `between`
    the usual standard deviation among visits, as a ratio: a board may have a quarter of it, or 16
    times as much."""

    confidence: float = 0.99
    least: float = 0.01
    between: float = 0.01
    budget: int = 150  # visits

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1.0:
            raise ValueError(f"confidence {self.confidence}, expected one between 0.5 and 1")
        if not 0.0 < self.least < 1.0 or not 0.0 < self.between < 1.0:
            raise ValueError("least and between are ratios above 0 and below 1")
        if self.budget < 8:
            raise ValueError(f"a budget of {self.budget} visits, expected at least 8")


@dataclasses.dataclass(frozen=True)
class _Visit:
    position: int
    value: float  # log of the visit's median
    within: float  # variance of the median within the visit
    phase: str


def _whitened(rows: Array, step: float) -> tuple[Array, float]:
    """Rows (R, n) in which noise of variance 1 about a level that walks by `step` a visit became
    white, with the level projected out; and the log of what that adds to their likelihood."""
    n = rows.shape[1]
    steps = np.arange(n, dtype=np.float64)
    root = np.linalg.cholesky(np.eye(n) + step**2 * np.minimum(steps[:, None], steps[None, :]))
    white = linalg.solve_triangular(root, np.vstack((np.ones(n), rows)).T, lower=True).T
    level, rest = white[0], white[1:]
    known = float(level @ level)
    rest = rest - np.outer(rest @ level / known, level)
    return rest, -float(np.log(np.diag(root)).sum()) - 0.5 * math.log(known / n)


class PerformanceSearch:
    """Ask and tell. Values are times or sizes: more is worse."""

    def __init__(self, line: Line, settings: Settings | None = None) -> None:
        self.line, self.settings = line, settings or Settings()
        self._visits: list[_Visit] = []
        self._since_good = 0
        self._doubt: float | None = None  # by how much a good visit was off
        self._drifted: str | None = None
        self._found_apart = False
        self._named: Candidate | None = None
        self._fresh: list[tuple[int, float]] = []  # (0 parent or 1 named, value) to verify
        least = math.log1p(self.settings.least)
        self._effects = np.geomspace(least, MAX_EFFECT, EFFECTS)
        # In standard deviations of the logarithm: a board may be far worse than is usual.
        grid = np.linspace(-2.0, 4.0, BETWEENS)
        self._betweens = self.settings.between * np.exp(0.7 * grid)
        self._log_prior_between = stats.norm.logpdf(grid) - logsumexp(stats.norm.logpdf(grid))
        self._cached: tuple[Array, float] | None = None

    # --- asking -------------------------------------------------------------------------------

    def ask(self) -> Question | Answer:
        """The next visit, or the end."""
        if self.line.same_ends:
            return Answer(
                Outcome.SAME_BUILD,
                "the good and the bad revision are the same build: what differs between them does "
                "not run on a board",
            )
        for end, name in ((0, "good"), (self.line.last, "bad")):
            if not self.line.testable(end):
                return Answer(Outcome.UNTESTABLE, f"the {name} revision cannot be measured")
        if self._drifted is not None:
            return Answer(Outcome.ENVIRONMENT, self._drifted, details=self._details())
        if self._doubt is not None:
            return Question(0, "good again")
        posterior, no_change = self.posterior()
        if not self._found_apart:
            answer = self._ends(no_change)
            if answer is not None:
                return answer
        candidates = self.line.candidates()
        if not candidates:
            return Answer(
                Outcome.INCONCLUSIVE,
                "every revision between has a build that occurs on both sides of it",
            )
        if self._named is not None:
            asked = self._verify()
            if asked is not None:
                return asked
        best = int(np.argmax(posterior))
        if posterior[best] >= self.settings.confidence:
            self._named, self._fresh = candidates[best], []
            asked = self._verify()
            if asked is not None:
                return asked
        if len(self._visits) >= self.settings.budget:
            return self._spent(posterior, no_change)
        if self._since_good >= GOOD_EVERY - 1:
            return Question(0, "good")
        return Question(self._halving(posterior), "search")

    def _ends(self, no_change: float) -> Question | Answer | None:
        """Whether the two ends differ at all; None when they do."""
        told = [visit.position for visit in self._visits]
        good, bad = told.count(0), told.count(self.line.canonical(self.line.last))
        if min(good, bad) >= 2 and (good + bad) % 2 == 0:
            if no_change <= 1.0 - self.settings.confidence:
                self._found_apart = True
                return None
            ratio = self._ratio()
            if no_change >= self.settings.confidence or good + bad >= self.settings.budget // 2:
                sure = no_change >= self.settings.confidence
                return Answer(
                    Outcome.BAD_PASSES,
                    f"the bad revision is {ratio:+.1%} against the good one in {good + bad} visits"
                    + (
                        f": no change of {self.settings.least:.1%} or more"
                        if sure
                        else ", too little for this board's noise to tell"
                    ),
                    confidence=no_change if sure else None,
                    details=self._details(),
                )
        at = (good + bad) % 4
        return Question(self.line.last if ABBA[at] else 0, "ends")

    def _halving(self, posterior: Array) -> int:
        """The position whose visit halves the posterior best; of equals the one visited least."""
        candidates = self.line.candidates()
        bad = np.cumsum(posterior) / posterior.sum()  # P(bad at candidate.last)
        places = [0, *(candidate.last for candidate in candidates)]
        share = np.concatenate(([0.0], bad))
        told = [self.line.canonical(visit.position) for visit in self._visits]
        counts = [told.count(self.line.canonical(place)) for place in places]
        # Rounded, so that a tie is one whatever the order of additions was.
        order = [
            (-round(float(p * (1.0 - p)), 6), count, place)
            for p, count, place in zip(share, counts, places, strict=True)
        ]
        return min(order)[2]

    def _verify(self) -> Question | Answer | None:
        """The next visit of the ABBA blocks, or what they say; None: they refute the name, and the
        search goes on with what they told."""
        named = self._named
        if named is None:
            return None
        effect, sigma = self._estimates(named)
        evidence = self._evidence(effect, sigma)
        whole = len(self._fresh) % len(ABBA) == 0 and bool(self._fresh)
        posterior, _ = self.posterior()
        share = float(posterior[self.line.candidates().index(named)])
        sure = math.log(self.settings.confidence / (1.0 - self.settings.confidence))
        if whole and evidence >= min(sure, math.log(19.0)) and share >= self.settings.confidence:
            return self._name(named, share)
        if whole and (evidence <= -math.log(19.0) or share < 0.5):
            self._named = None
            return None
        if len(self._fresh) >= BLOCKS * len(ABBA):
            return Answer(
                Outcome.UNVERIFIED,
                f"the search names it, but {len(self._fresh)} visits against its parent do not "
                "tell",
                named.positions,
                share,
                self._details(),
            )
        place = named.last if ABBA[len(self._fresh) % len(ABBA)] else named.first - 1
        return Question(place, "verify")

    def _sides(self) -> tuple[list[float], list[float]]:
        """The fresh values of the parent, and of the named revision."""
        parent, named = ([value for side, value in self._fresh if side == at] for at in (0, 1))
        return parent, named

    def _evidence(self, effect: float, sigma: float) -> float:
        """Log of how much better the fresh visits fit the effect than none."""
        sides = self._sides()
        if not sides[0] or not sides[1]:
            return 0.0
        difference = float(np.mean(sides[1]) - np.mean(sides[0]))
        error = sigma * math.sqrt(1.0 / len(sides[0]) + 1.0 / len(sides[1]))
        found = stats.norm.logpdf(difference, effect, error)
        return float(found - stats.norm.logpdf(difference, 0.0, error))

    def _name(self, named: Candidate, share: float) -> Answer:
        sides = self._sides()
        effect = math.expm1(float(np.mean(sides[1]) - np.mean(sides[0])))  # next to each other
        sigma = self._estimates(named)[1]
        details = {**self._details(), "effect": effect, "visit_sd": sigma}
        if len(named.positions) > 1:
            return Answer(
                Outcome.RANGE,
                f"{effect:+.1%} came with one of {len(named.positions)} revisions, of which only "
                "the last can be measured",
                named.positions,
                share,
                details,
            )
        return Answer(
            Outcome.NAMED,
            f"{effect:+.1%}, confirmed against its parent in {len(self._fresh)} visits",
            named.positions,
            share,
            details,
        )

    def _spent(self, posterior: Array, no_change: float) -> Answer:
        inside = credible(posterior, self.settings.confidence)
        positions = tuple(p for at in inside for p in self.line.candidates()[at].positions)
        return Answer(
            Outcome.INCONCLUSIVE,
            f"{len(self._visits)} visits leave {len(positions)} revisions",
            positions,
            float(posterior[inside].sum()) if no_change < 0.5 else None,
            self._details(),
        )

    # --- telling ------------------------------------------------------------------------------

    def tell(self, question: Question, values: list[float]) -> None:
        """The repeats of one visit, in the metric's unit. Raises ValueError for none, or for what
        is not a positive number."""
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(f"values of a visit {values[:3]}, expected positive numbers")
        logs = np.log(values)
        within = float(np.var(logs, ddof=1)) / len(logs) if len(logs) > 1 else 0.0
        place = self.line.canonical(question.position)
        visit = _Visit(place, float(np.median(logs)), within, question.phase)
        if visit.position == 0 and question.phase != "ends":
            self._watch(visit, again=question.phase == "good again")
        self._since_good = 0 if visit.position == 0 else self._since_good + 1
        self._visits.append(visit)
        self._cached = None
        if question.phase == "verify" and self._named is not None:
            self._fresh.append((int(question.position >= self._named.last), visit.value))

    def untestable(self, position: int) -> None:
        """The build at `position` cannot be measured."""
        self.line.exclude(position)
        self._named, self._cached = None, None

    def _watch(self, visit: _Visit, *, again: bool) -> None:
        """Is the good revision still what it was? One visit may be bad luck; two are not."""
        doubt, self._doubt = self._doubt, None
        before = [one.value for one in self._visits if one.position == 0]
        if again:
            before = before[:-1]  # the doubtful one is the last of them
        before = before[-LATELY:]
        if len(before) < 2:
            return
        off = visit.value - float(np.mean(before))
        beyond = abs(off) > DRIFT_SIGMAS * self._first_sigma() * math.sqrt(1.0 + 1.0 / len(before))
        if not again:
            self._doubt = off if beyond else None
        elif beyond and doubt is not None and off * doubt > 0:
            self._drifted = (
                f"the good revision itself moved by {math.expm1((off + doubt) / 2):+.1%} between "
                f"{len(before)} visits and the next two: the board or what runs beside "
                "it changed"
            )
        else:  # it tells nothing about any revision
            last = max(at for at, one in enumerate(self._visits) if one.position == 0)
            del self._visits[last]

    # --- the posterior ------------------------------------------------------------------------

    def posterior(self) -> tuple[Array, float]:
        """(probability of each candidate of the line (C,), of no change at all)."""
        if self._cached is None:
            log_change, log_none = self._marginals()
            everything = logsumexp(np.concatenate((log_change.ravel(), [log_none])))
            share = np.exp(logsumexp(log_change, axis=(1, 2)) - everything)
            self._cached = (share, float(np.exp(log_none - everything)))
        return self._cached

    def shares(self) -> dict[int, float]:
        """Position → the probability that it is to blame, given that the ends differ."""
        posterior, no_change = self.posterior()
        rest = max(1.0 - no_change, 1e-300)
        return {
            at: float(share) / rest / len(candidate.positions)
            for candidate, share in zip(self.line.candidates(), posterior, strict=True)
            for at in candidate.positions
        }

    @property
    def effect(self) -> float:
        """The ratio - 1 of the change, were the likeliest candidate to blame: between the means of
        the visits before and after it."""
        posterior, _ = self.posterior()
        named = self.line.candidates()[int(np.argmax(posterior))]
        sides = [
            [one.value for one in self._visits if (one.position >= named.last) == after]
            for after in (False, True)
        ]
        return math.expm1(float(np.mean(sides[1]) - np.mean(sides[0])))

    def _marginals(self) -> tuple[Array, float]:
        """Log weights (C, EFFECTS, BETWEENS) of change points, and of no change."""
        candidates = self.line.candidates()
        sizes = np.array([len(candidate.positions) for candidate in candidates], np.float64)
        log_prior = np.log(sizes / sizes.sum()) if len(sizes) else sizes
        y = np.array([visit.value for visit in self._visits])
        at = np.array([visit.position for visit in self._visits])
        n = len(y)
        if n == 0:
            each = np.full((len(sizes), EFFECTS, BETWEENS), -math.log(EFFECTS))
            each += log_prior[:, None, None] + self._log_prior_between
            return each + math.log(1.0 - NO_CHANGE), math.log(NO_CHANGE)
        variance = self._betweens**2 + self._within()  # (BETWEENS,)
        lasts = np.array([candidate.last for candidate in candidates], np.int64)
        x = (at[None, :] >= lasts[:, None]).astype(np.float64)  # (C, n)
        scale = -0.5 * (n - 1) * np.log(variance)  # the level is integrated out
        effects = self._effects
        changes, nones = [], []
        for step, log_prior_walk in zip(WALKS, LOG_PRIOR_WALK, strict=True):
            white, log_scale = _whitened(np.vstack((y - y.mean(), x)), step)
            yw, xw = white[0], white[1:]
            sxx, sxy, syy = (xw**2).sum(1), xw @ yw, float(yw @ yw)
            rss = syy - 2.0 * effects * sxy[:, None] + effects**2 * sxx[:, None]  # (C, EFFECTS)
            each = scale + log_scale + log_prior_walk
            changes.append(each - 0.5 * rss[:, :, None] / variance)
            nones.append(each - 0.5 * syy / variance + self._log_prior_between)
        log_change = np.asarray(logsumexp(changes, axis=0))
        log_change += log_prior[:, None, None] + self._log_prior_between - math.log(EFFECTS)
        log_none = float(logsumexp(nones))
        return log_change + math.log(1.0 - NO_CHANGE), log_none + math.log(NO_CHANGE)

    def _within(self) -> float:
        """What the repeats' own scatter adds to a visit's variance; the median of a few normal
        values has π/2 of the mean's (A. Stuart and K. Ord, Kendall's Advanced Theory, 10.10)."""
        return 0.5 * math.pi * float(np.mean([visit.within for visit in self._visits]))

    def _estimates(self, named: Candidate) -> tuple[float, float]:
        """(effect as a log ratio, standard deviation of a visit), were `named` to blame."""
        log_change, _ = self._marginals()
        weights = log_change[self.line.candidates().index(named)]
        weights = np.exp(weights - logsumexp(weights))  # (EFFECTS, BETWEENS)
        effect = float(weights.sum(1) @ self._effects)
        variance = self._betweens**2 + self._within()
        return effect, math.sqrt(float(weights.sum(0) @ variance))

    def _first_sigma(self) -> float:
        """Standard deviation of a visit while the ends were compared, before anything can have
        drifted far: pooled over both, with the usual one as four visits more."""
        squares, free = 4.0 * (self.settings.between**2 + self._within()), 4
        for end in (0, self.line.canonical(self.line.last)):
            values = [v.value for v in self._visits if v.phase == "ends" and v.position == end]
            squares += float(np.var(values)) * len(values)
            free += len(values) - 1
        return math.sqrt(squares / free)

    def _ratio(self) -> float:
        sides = [
            [visit.value for visit in self._visits if visit.position == end]
            for end in (0, self.line.canonical(self.line.last))
        ]
        return math.expm1(float(np.mean(sides[1]) - np.mean(sides[0])))

    def _details(self) -> dict[str, object]:
        return {"visits": len(self._visits)}


def credible(posterior: Array, confidence: float) -> npt.NDArray[np.int64]:
    """The shortest range of neighbours that holds `confidence` of `posterior` (C,): indices."""
    total = posterior / max(float(posterior.sum()), 1e-300)
    sums = np.concatenate(([0.0], np.cumsum(total)))
    best = (0, len(total) - 1)
    for start in range(len(total)):
        end = int(np.searchsorted(sums, sums[start] + confidence - 1e-12)) - 1
        if end < len(total) and end - start < best[1] - best[0]:
            best = (start, max(end, start))
    return np.arange(best[0], best[1] + 1)
