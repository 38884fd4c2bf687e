"""Planted regressions: one commit of many is to blame, its failures rare or its cost small.

Baselines on the same plants: git bisect (one run a step), git bisect with ten runs a step, and for
times git bisect with one run, or with the median of 20 runs of one visit, against the middle
between the two ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from harness.bisect import performance, revisions
from harness.bisect.lines import Answer, Line, Outcome, Question
from harness.bisect.trials import Result
from tests.planted.cases import Bench, Case, Context, Target

LONG, SHORT = 200, 64  # commits
EFFECT, RUN_SD, VISIT_SD, REPEATS = 0.03, 0.02, 0.01, 5
RARE = 0.3  # of a flaky failure
BACKGROUND = 0.01
SURE = revisions.Settings(least_rate=revisions.SURE_RATE)  # as for wrong results
UNSURE = revisions.Settings(least_rate=revisions.LEAST_RATE)  # as for crashes and tests
UNBUILDABLE = 0.15

CERTAIN = f"certain failure, {LONG} commits"
FLAKY = f"failure in {RARE:.0%} of runs, {LONG} commits"
BROKEN = f"certain failure, {UNBUILDABLE:.0%} of {LONG} commits do not build"
SLOWER = f"{EFFECT:.0%} slower, {SHORT} commits"
NO_FAILURE, NO_CHANGE = "clean control: never fails", "clean control: as fast as before"
DRIFT = "clean control: the board drifts by 5 %"


def run(context: Context) -> Iterator[Case]:
    for number in range(context.cases):
        rng = np.random.default_rng([context.seed, number])
        yield from _failing(CERTAIN, Plant(rng, LONG, 1.0, 0.0), SURE)
        yield from _failing(FLAKY, Plant(rng, LONG, RARE, BACKGROUND), UNSURE)
        broken = Plant(rng, LONG, 1.0, 0.0)
        broken.skip = {int(at) for at in np.flatnonzero(rng.random(LONG + 1) < UNBUILDABLE)}
        broken.skip -= {0, LONG}
        yield from _failing(BROKEN, broken, SURE)
        yield from _failing(NO_FAILURE, Plant(rng, LONG, 0.0, 0.0, clean=True), UNSURE)
        yield from _slower(SLOWER, Speed(rng, EFFECT))
        yield from _slower(NO_CHANGE, Speed(rng, 0.0))
        yield from _slower(DRIFT, Speed(rng, 0.0, drift=0.05))


# --- failures -----------------------------------------------------------------------------------


class Plant:
    """A failure that commit `culprit` brought in; each `fails` is a run."""

    def __init__(
        self, rng: np.random.Generator, commits: int, p: float, q: float, *, clean: bool = False
    ) -> None:
        self.commits, self._p, self._q, self._rng = commits, p, q, rng
        self.culprit = int(rng.integers(1, commits + 1))
        self.clean = clean
        self.skip: set[int] = set()
        self.runs = 0

    @property
    def truth(self) -> frozenset[str]:
        return frozenset() if self.clean else frozenset({str(self.culprit)})

    def fails(self, position: int) -> bool:
        self.runs += 1
        return bool(self._rng.random() < (self._p if position >= self.culprit else self._q))


def _failing(kind: str, plant: Plant, settings: revisions.Settings) -> Iterator[Case]:
    line = Line([str(at) for at in range(plant.commits + 1)])
    search = revisions.FailureSearch(line, settings)
    while isinstance(asked := search.ask(), Question):
        if asked.position in plant.skip:
            search.untestable(asked.position)
        else:
            failed = plant.fails(asked.position)
            search.tell(asked, Result.FAIL if failed else Result.PASS, "it" if failed else None)
    yield _case(kind, plant.truth, asked, plant.runs)
    if plant.clean:
        return
    for contestant, runs in (("git bisect", 1), ("git bisect, 10 runs a step", 10)):
        plant.runs = 0
        named = _git_bisect(plant.commits, plant.skip, _any_of(plant, runs))
        yield Case(kind, plant.truth, named, plant.runs, contestant=contestant)


def _any_of(plant: Plant, runs: int) -> Callable[[int], bool]:
    return lambda position: any(plant.fails(position) for _ in range(runs))


def _git_bisect(commits: int, skip: set[int], is_bad: Callable[[int], bool]) -> frozenset[str]:
    """As git does it: halves, nearest neighbours of what is skipped, all that remain at the end."""
    low, high = 0, commits
    while True:
        inside = [at for at in range(low + 1, high) if at not in skip]
        if not inside:
            return frozenset(str(at) for at in range(low + 1, high + 1))
        middle = min(inside, key=lambda at: abs(2 * at - low - high))
        if is_bad(middle):
            high = middle
        else:
            low = middle


# --- times --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Speed:
    """Times of a board whose visits have luck of their own; commit `culprit` costs `effect`."""

    rng: np.random.Generator
    effect: float
    drift: float = 0.0  # over 60 visits
    visits: int = 0

    def __post_init__(self) -> None:
        self.culprit = int(self.rng.integers(1, SHORT + 1))

    @property
    def truth(self) -> frozenset[str]:
        return frozenset({str(self.culprit)} if self.effect else ())

    def visit(self, position: int, repeats: int) -> list[float]:
        drifted = 1.0 + self.drift * min(1.0, self.visits / 60)
        self.visits += 1
        level = 0.02 * drifted * (1.0 + self.effect * (position >= self.culprit))
        level *= 1.0 + VISIT_SD * self.rng.standard_normal()
        noise = RUN_SD * self.rng.standard_normal(repeats)
        return [float(value) for value in level * (1.0 + noise)]


def _slower(kind: str, speed: Speed) -> Iterator[Case]:
    line = Line([str(at) for at in range(SHORT + 1)])
    search = performance.PerformanceSearch(line)
    while isinstance(asked := search.ask(), Question):
        search.tell(asked, speed.visit(asked.position, REPEATS))
    yield _case(kind, speed.truth, asked, speed.visits)
    if not speed.effect:
        return
    for contestant, repeats in (("git bisect", 1), ("git bisect, median of 20", 20)):
        speed.visits = 0
        ends = [float(np.median(speed.visit(end, repeats))) for end in (0, SHORT)]
        named = _git_bisect(SHORT, set(), _above(speed, repeats, sum(ends) / 2))
        yield Case(kind, speed.truth, named, speed.visits, contestant=contestant)


def _above(speed: Speed, repeats: int, middle: float) -> Callable[[int], bool]:
    return lambda position: float(np.median(speed.visit(position, repeats))) > middle


def _case(kind: str, truth: frozenset[str], answer: Answer, runs: int) -> Case:
    blames = answer.outcome in (Outcome.NAMED, Outcome.RANGE)
    named = frozenset(str(at) for at in answer.positions) if blames else frozenset()
    # Of a range the confidence is that it is one of them, which the table's last column cannot say.
    claimed = answer.confidence if answer.outcome is Outcome.NAMED else None
    return Case(kind, truth, named, runs, claimed=claimed, note=answer.outcome.value)


BENCH = Bench(
    name="revisions",
    help="commits that broke something, or made it slower",
    run=run,
    targets=(
        Target(CERTAIN, "exact", at_least=0.98),
        Target(CERTAIN, "runs_p95", at_most=20),
        Target(CERTAIN, "wrong_high", at_most=0.03),
        Target(FLAKY, "exact", at_least=0.95),
        Target(FLAKY, "wrong_high", at_most=0.03),
        Target(BROKEN, "wrong_high", at_most=0.03),
        Target(NO_FAILURE, "wrong", at_most=0),
        Target(SLOWER, "exact", at_least=0.9),
        Target(SLOWER, "runs_mean", at_most=100),
        Target(SLOWER, "wrong_high", at_most=0.03),
        Target(NO_CHANGE, "wrong", at_most=0),
        Target(DRIFT, "wrong", at_most=0),
    ),
)
