"""Options that make an engine fail, planted by seed in a simulated one: are they named?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from harness.bisect.option_space import Space
from harness.bisect.option_verdicts import Outcome, Question
from harness.bisect.options import OptionSearch
from harness.bisect.trials import Result
from tests.planted.cases import Bench, Case, Context, Target
from tests.planted.simulated_options import SimulatedEngine, space

FLAKY_P, BACKGROUND = 0.2, 0.01
Make = Callable[[Space, np.random.Generator], tuple[SimulatedEngine, frozenset[str]]]


def run(context: Context) -> Iterator[Case]:
    found = space()
    for number, (kind, make) in enumerate(KINDS.items()):
        for case in range(context.cases):
            seed = [context.seed, number, case]
            yield _ours(kind, make, found, seed)
            yield _left_out(kind, make, found, seed)


def _ours(kind: str, make: Make, found: Space, seed: list[int]) -> Case:
    engine, truth = make(found, np.random.default_rng(seed))
    search = OptionSearch(found, budget=5000)
    verdict = engine.search(search)
    named: frozenset[str] = frozenset()
    if verdict.outcome is Outcome.NAMED:
        named = frozenset(name for one in verdict.sets for name in one.options)
    return Case(
        kind, truth, named, engine.runs, claimed=verdict.confidence, note=verdict.outcome.value
    )


def _left_out(kind: str, make: Make, found: Space, seed: list[int]) -> Case:
    """What people do: switch off one option at a time, and blame those without which it passes."""
    engine, truth = make(found, np.random.default_rng(seed))
    full = engine.run(Question("", frozenset(found.names)))
    named = frozenset(
        name
        for name in found.names
        if full.result is Result.FAIL
        and engine.run(Question("", found.without([name]))).result is Result.PASS
    )
    needed = {need for name in named for need in found.closed([name]) - {name}}
    return Case(kind, truth, named - needed, engine.runs, contestant="one at a time")


def _choose(found: Space, rng: np.random.Generator, count: int) -> list[str]:
    """Options of which none needs another."""
    while True:
        chosen = [str(name) for name in rng.choice(found.names, count, replace=False)]
        if not any(a != b and a in found.closed([b]) for a in chosen for b in chosen):
            return chosen


def _single(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    truth = frozenset(_choose(found, rng, 1))
    return SimulatedEngine([truth], rng=rng), truth


def _flaky(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    truth = frozenset(_choose(found, rng, 1))
    return SimulatedEngine([truth], p=FLAKY_P, q=BACKGROUND, rng=rng), truth


def _pair(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    truth = frozenset(_choose(found, rng, 2))
    return SimulatedEngine([truth], rng=rng), truth


def _two(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    first, second = _choose(found, rng, 2)
    sets = [frozenset({first}), frozenset({second})]
    return SimulatedEngine(sets, rng=rng), frozenset({first, second})


def _broken(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    """Some options die in another way unless one behind them in the list is on too."""
    truth = frozenset(_choose(found, rng, 1))
    places = sorted(int(place) for place in rng.choice(len(found) - 3, 2, replace=False))
    broken = [(found.names[at], found.names[at + int(rng.integers(1, 4))]) for at in places]
    return SimulatedEngine([truth], broken=broken, rng=rng), truth


def _graded(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    """Every layer in int8 adds to the loss; the limit is reached by more than half of them."""
    layers = [name for name in found.names if name.startswith("int8.")]
    costs = dict(zip(layers, rng.uniform(0.5, 1.5, len(layers)), strict=True))
    limit = float(rng.uniform(0.5, 0.9)) * sum(costs.values())
    return SimulatedEngine([], costs=costs, limit=limit, rng=rng), frozenset()


def _clean(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    q = 0.0 if rng.random() < 0.5 else BACKGROUND / 2
    return SimulatedEngine([], q=q, rng=rng), frozenset()


def _always(found: Space, rng: np.random.Generator) -> tuple[SimulatedEngine, frozenset[str]]:
    """It fails with every option off as well."""
    p = float(rng.choice([1.0, 0.5]))
    return SimulatedEngine([frozenset()], p=p, rng=rng), frozenset()


KINDS: dict[str, Make] = {
    "option, certain": _single,
    "option, p = 20 %": _flaky,
    "pair of options": _pair,
    "two options, each alone": _two,
    "option, some do not run": _broken,
    "graded loss": _graded,
    "no option: it passes": _clean,
    "no option: it always fails": _always,
}

BENCH = Bench(
    name="options",
    help="options of a simulated engine: fusions, layouts, precisions, layers, threads",
    run=run,
    cases=300,
    quick_cases=30,
    targets=(
        *(Target(kind, "wrong_high", at_most=0.03) for kind in list(KINDS)[:5]),
        *(Target(kind, "wrong", at_most=0.0) for kind in list(KINDS)[5:]),
        Target("option, certain", "exact", at_least=0.99),
        Target("option, certain", "runs_mean", at_most=20.0),
        Target("option, p = 20 %", "exact", at_least=0.95),
        Target("pair of options", "exact", at_least=0.99),
        Target("two options, each alone", "exact", at_least=0.95),
    ),
)
