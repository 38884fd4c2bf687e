"""Ratios of two things that were measured in turns, with their spread.

The speed of a shared machine wanders by more than the differences that matter. Measured in turns,
ABBAAB…, both sides meet the same weather: the ratio is taken within each round, and the median of
the rounds is the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Ratio:
    """`value` is the median over rounds, `low` and `high` the extremes, `interval` a 95 % interval
    for the median."""

    value: float
    low: float
    high: float
    interval: tuple[float, float]
    rounds: int


def of_rounds(
    over: Sequence[float], under: Sequence[float], *, factor: float = 1.0, seed: int = 0
) -> Ratio:
    """The ratio `factor` · over / under, round by round; both (rounds,), positive.

    The interval is the percentile bootstrap of the median (B. Efron, "Bootstrap methods: another
    look at the jackknife", Ann. Statist. 7, 1979). Rounds are resampled whole, so that what both
    sides of a round share stays together. Raises ValueError for lengths that differ, no rounds, or
    numbers that are not positive and finite.
    """
    a, b = np.asarray(over, np.float64), np.asarray(under, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"rounds of both sides have shapes {a.shape} and {b.shape}")
    both = np.concatenate((a, b))
    if not np.isfinite(both).all() or both.min() <= 0:
        raise ValueError("a round has a number that is not positive and finite")
    ratios = factor * a / b
    rng = np.random.default_rng(seed)
    medians = np.median(ratios[rng.integers(0, len(ratios), (RESAMPLES, len(ratios)))], axis=1)
    low, high = np.quantile(medians, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Ratio(
        float(np.median(ratios)),
        float(ratios.min()),
        float(ratios.max()),
        (float(low), float(high)),
        len(ratios),
    )


def turns(names: Sequence[str], rounds: int) -> list[tuple[str, ...]]:
    """The order of each round. Every second one is reversed, so that a steady drift cancels, and
    the start moves on by one in each pair, so that nobody always follows the same neighbour."""
    orders = []
    for number in range(rounds):
        start = number // 2 % max(1, len(names))
        order = (*names[start:], *names[:start])
        orders.append(order if number % 2 == 0 else order[::-1])
    return orders
