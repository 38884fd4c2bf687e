"""Ratios of rounds: what both sides of a round share must not matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.ratios import of_rounds, turns

positive = st.floats(1e-6, 1e6)


@given(
    st.lists(st.tuples(positive, st.floats(0.5, 2.0)), min_size=1, max_size=30),
    st.floats(0.1, 10.0),
)
def test_weather_that_both_sides_share_cancels(
    rounds: list[tuple[float, float]], factor: float
) -> None:
    under = [base * weather for base, weather in rounds]
    found = of_rounds([factor * value for value in under], under)
    assert found.value == pytest.approx(factor)
    assert found.low == pytest.approx(found.high)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=30))
def test_the_median_lies_within_its_interval_and_that_within_the_extremes(
    rounds: list[tuple[float, float]],
) -> None:
    found = of_rounds([a for a, _ in rounds], [b for _, b in rounds])
    low, high = found.interval
    assert found.low <= low <= found.value <= high <= found.high
    assert found.rounds == len(rounds)


def test_one_disturbed_round_moves_the_extreme_and_not_the_median() -> None:
    found = of_rounds([2.0] * 10 + [90.0], [1.0] * 11)
    assert (found.value, found.high) == (2.0, 90.0)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for number in range(200):
        values = rng.lognormal(np.log(1.5), 0.1, 11)
        low, high = of_rounds(values.tolist(), [1.0] * 11, seed=number).interval
        covered += low <= 1.5 <= high
    assert covered >= 170  # 85 % of 200; a percentile interval of few rounds is a little narrow


@pytest.mark.parametrize(
    ("over", "under"),
    [([], []), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [float("nan")])],
)
def test_rounds_that_cannot_be_compared_are_refused(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match="round"):
        of_rounds(over, under)


@given(st.integers(1, 6), st.integers(1, 20))
def test_every_round_has_everybody_once_and_the_next_goes_back(count: int, rounds: int) -> None:
    names = [f"n{index}" for index in range(count)]
    orders = turns(names, rounds)
    assert len(orders) == rounds
    for order in orders:
        assert sorted(order) == names
    for first, second in zip(orders[::2], orders[1::2], strict=False):
        assert second == first[::-1]


def test_a_steady_drift_cancels_over_a_pair_of_rounds() -> None:
    clock, place = 0, {"a": 0, "b": 0}
    for order in turns(["a", "b"], 8):
        for name in order:
            place[name] += clock
            clock += 1
    assert place["a"] == place["b"]
