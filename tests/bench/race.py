"""Contestants measured in turns, after each has shown its golden tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .gates import Checked, compare
from .machine import disturbance, taken, usage
from .predictions import Reference
from .ratios import Ratio, of_rounds, turns
from .results import Check

SETTLE_S = 0.03  # a team that spins when its step is done has gone to sleep by then
WARM_TOKENS = 2  # of each phase: they fetch back what the others pushed out of the caches

Phase = Callable[[], float]  # one turn; a cost, such as seconds per token


@dataclasses.dataclass(frozen=True)
class Race:
    """`costs` of each contestant, one number a round; `shares` of the processors others had."""

    costs: Mapping[str, tuple[float, ...]]
    shares: Mapping[str, float]

    def __add__(self, other: Race) -> Race:
        """The rounds of both, of the same contestants."""
        costs = {name: (*values, *other.costs[name]) for name, values in self.costs.items()}
        rounds = [len(next(iter(part.costs.values()))) for part in (self, other)]
        shares = {
            name: float(np.average((share, other.shares[name]), weights=rounds))
            for name, share in self.shares.items()
        }
        return Race(costs, shares)

    def ratio(self, slow: str, fast: str) -> Ratio:
        """How many times the cost of `fast` is the cost of `slow`."""
        return of_rounds(self.costs[slow], self.costs[fast])

    def median(self, name: str) -> float:
        return float(np.median(self.costs[name]))

    def best(self, names: Sequence[str]) -> str:
        return min(names, key=self.median)

    @property
    def notes(self) -> list[str]:
        return disturbance(dict(self.shares))

    @property
    def evidence(self) -> dict[str, Any]:
        return {"costs": dict(self.costs), "shares": dict(self.shares)}


def race(phases: Mapping[str, Phase], rounds: int, pids: Sequence[int]) -> Race:
    """Every contestant once per round, in an order that changes. One phase each goes ahead,
    uncounted, so that nobody pays for first touches."""
    for phase in phases.values():
        phase()
    costs: dict[str, list[float]] = {name: [] for name in phases}
    before = usage(pids)
    for order in turns(list(phases), rounds):
        for name in order:
            time.sleep(SETTLE_S)
            costs[name].append(phases[name]())
    shares = taken(before, usage(pids))
    return Race({name: tuple(values) for name, values in costs.items()}, shares)


def seconds_per_token(seconds: Sequence[float]) -> float:
    """The median of one phase's tokens, the first ones aside."""
    return float(np.median(seconds[WARM_TOKENS:]))


def golden(
    contestants: Sequence[Checked],
    reference: Reference,
    tokens: Sequence[int],
    mode: str = "decode",
) -> list[Check]:
    """Each contestant's predictions after `tokens`, fed behind its depth, against the reference's.

    `mode` is the way they are computed, "decode" (token by token) or "prefill": the one whose speed
    is going to be measured.
    """
    ids = reference.ids.tolist()
    return [
        compare(item.name, item.gate, reference, item.predictions(tokens, ids, mode))
        for item in contestants
    ]
