"""Races among 200 steps by seed: ours with and without delays, and what others do."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator

from tests.planted.baselines import BASELINES, Repeated, Spent
from tests.planted.cases import Bench, Case, Context, Target
from tests.planted.worlds import Planted, World, search, steps_of

STEPS = 200
DELTA = 0.01
BUDGET = 4000  # runs, for everybody
REPEATS = math.ceil(math.log(DELTA) / math.log(1 - 0.05))  # what p = 5 % takes to be sure of a pass
GIT_REPEATS = 10

Plant = Callable[[random.Random, list[str]], tuple[list[Planted], float]]  # and the background


@dataclasses.dataclass(frozen=True)
class Kind:
    """`plant` draws races and the background rate. `baselines`: whether others try it too."""

    name: str
    plant: Plant
    delays: bool = True
    baselines: bool = False


def _single(p: float, background: float = 0.0) -> Plant:
    def plant(chance: random.Random, steps: list[str]) -> tuple[list[Planted], float]:
        step = frozenset({chance.choice(steps)})
        return [Planted(step, p, max(p, chance.uniform(0.4, 0.95)))], background

    return plant


def _any_p(chance: random.Random, steps: list[str]) -> tuple[list[Planted], float]:
    p = math.exp(chance.uniform(math.log(0.005), 0.0))
    raised = max(p, chance.uniform(0.4, 0.95))
    background = chance.choice([0.0, 0.0, 0.005, 0.02])
    return [Planted(frozenset({chance.choice(steps)}), p, raised)], background


def _pair(chance: random.Random, steps: list[str]) -> tuple[list[Planted], float]:
    return [Planted(frozenset(chance.sample(steps, 2)), 0.05, chance.uniform(0.4, 0.95))], 0.0


def _two(chance: random.Random, steps: list[str]) -> tuple[list[Planted], float]:
    one, other = chance.sample(steps, 2)
    return [
        Planted(frozenset({one}), 0.05, chance.uniform(0.4, 0.95)),
        Planted(frozenset({other}), 0.1, chance.uniform(0.4, 0.95)),
    ], 0.0


def _masked(chance: random.Random, steps: list[str]) -> tuple[list[Planted], float]:
    step, hides = chance.sample(steps, 2)
    remains = chance.choice([0.0, 0.3])
    race = Planted(frozenset({step}), 0.2, 0.6, frozenset({hides}), remains)
    return [race], 0.0


def _clean(chance: random.Random, steps: list[str]) -> tuple[list[Planted], float]:
    del steps
    return [], chance.choice([0.0, 0.005, 0.02])


KINDS = (
    Kind("race p=1", _single(1.0), baselines=True),
    Kind("race p=5%, delays", _single(0.05)),
    Kind("race p=5%, no delays", _single(0.05), delays=False, baselines=True),
    Kind("race p=20% q=2%", _single(0.2, 0.02)),
    Kind("race p=0.5..100% q=0..2%", _any_p),
    Kind("pair p=5%, delays", _pair),
    Kind("pair p=5%, no delays", _pair, delays=False, baselines=True),
    Kind("two races", _two),
    Kind("masked race", _masked),
    Kind("no race q=0..2%", _clean),
)


def run(context: Context) -> Iterator[Case]:
    for number, kind in enumerate(KINDS):
        for case in range(context.cases):
            seed = f"{context.seed}/{number}/{case}"
            yield _ours(kind, seed)
            if kind.baselines:
                yield from (_baseline(kind, seed, name) for name in BASELINES)


def _world(kind: Kind, seed: str, contestant: str) -> World:
    """The same faults for everybody, and for each a chance of its own."""
    steps = steps_of(STEPS)
    planted, background = kind.plant(random.Random(seed), steps)
    chance = random.Random(f"{seed}/{contestant}")
    return World(steps, planted, chance, background)


def _ours(kind: Kind, seed: str) -> Case:
    world = _world(kind, seed, "ours")
    verdict, runs = search(world, delta=DELTA, budget=BUDGET, delays=kind.delays)
    truths = [race.steps for race in world.planted]
    named = [frozenset(race.steps) for race in verdict.races]
    truth: frozenset[str] = frozenset().union(*truths)
    note = verdict.outcome.value
    if named and len(named) < len(truths) and all(one in truths for one in named):
        # Right, but not all: neither exact nor a wrong name.
        named, note = [], f"{len(named)} of {len(truths)} races"
    return Case(
        kind.name,
        truth,
        frozenset().union(*named),
        runs,
        claimed=min((race.probability for race in verdict.races), default=None) if named else None,
        note=note,
    )


def _baseline(kind: Kind, seed: str, name: str) -> Case:
    world = _world(kind, seed, name)
    repeats = GIT_REPEATS if name == "git bisect" else REPEATS
    try:
        named = BASELINES[name](Repeated(world, repeats, BUDGET))
    except Spent:
        named = frozenset()
    truth: frozenset[str] = frozenset().union(*(race.steps for race in world.planted))
    return Case(kind.name, truth, named, world.runs, contestant=name)


BENCH = Bench(
    "races",
    "one race, two, or a pair among 200 steps, by simulated boards",
    run,
    targets=(
        Target("race p=1", "exact", at_least=0.98),
        Target("race p=1", "runs_mean", at_most=20),
        Target("race p=5%, delays", "exact", at_least=0.98),
        Target("race p=5%, delays", "runs_mean", at_most=150),
        Target("race p=5%, no delays", "exact", at_least=0.98),
        Target("race p=5%, no delays", "runs_mean", at_most=750),
        Target("pair p=5%, no delays", "exact", at_least=0.95),
        Target("pair p=5%, no delays", "runs_mean", at_most=1600),
        *(
            Target(kind.name, score, at_most=limit)
            for kind in KINDS
            for score, limit in (("wrong", 0.01), ("wrong_high", 0.03))
        ),
    ),
)
