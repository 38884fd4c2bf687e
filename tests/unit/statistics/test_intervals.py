"""Intervals cover what they claim to."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from harness.statistics.bootstrap import mean_interval, percentile_interval, wilson


def test_mean_interval_covers_the_mean_of_skewed_values() -> None:
    rng = np.random.default_rng(1)
    trials = 300
    covered = 0
    for trial in range(trials):
        low, high = mean_interval(rng.lognormal(0, 1, 100), resamples=800, seed=trial)
        covered += low <= np.exp(0.5) <= high
    # Skewed values of this size cost every bootstrap some coverage: 91 to 95 of the claimed 95 %.
    assert covered >= 0.89 * trials


def test_mean_interval_covers_the_mean_of_symmetric_values() -> None:
    rng = np.random.default_rng(2)
    trials = 300
    covered = sum(
        low <= 0 <= high
        for low, high in (
            mean_interval(rng.standard_normal(60), resamples=800, seed=trial)
            for trial in range(trials)
        )
    )
    assert 0.915 * trials <= covered <= 0.985 * trials


def test_mean_interval_equals_an_independent_implementation_on_skewed_values() -> None:
    values = np.random.default_rng(5).lognormal(0, 1.5, 60)
    expected = stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=20_000, rng=np.random.default_rng(6)
    ).confidence_interval
    low, high = mean_interval(values, resamples=20_000, seed=7)
    assert low == pytest.approx(expected.low, rel=0.02)
    assert high == pytest.approx(expected.high, rel=0.02)


def test_mean_interval_is_repeatable_and_holds_the_mean() -> None:
    values = np.random.default_rng(3).exponential(1.0, 200)
    assert mean_interval(values) == mean_interval(values)
    low, high = mean_interval(values)
    assert low < values.mean() < high


def test_mean_interval_of_equal_values_has_no_width() -> None:
    assert mean_interval([3.0]) == (3.0, 3.0)
    assert mean_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_mean_interval_refuses_what_has_no_mean() -> None:
    for values in ([], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="finite"):
            mean_interval(values)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (499, 500), (1, 1)])
def test_wilson_equals_an_independent_implementation(k: int, n: int) -> None:
    expected = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_of_no_trials_tells_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_refuses_more_successes_than_trials() -> None:
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson(5, 4)


def test_a_percentile_is_as_uncertain_as_the_groups_that_its_values_come_in() -> None:
    rng = np.random.default_rng(1)
    alike = [rng.exponential(size=100) for _ in range(8)]
    low, high = percentile_interval(alike, 99)
    assert low < np.percentile(np.concatenate(alike), 99) <= high
    odd = [*alike[:7], alike[7] * 20]
    odd_low, odd_high = percentile_interval(odd, 99)
    assert odd_low < 2 * high  # without the odd group
    assert odd_high > 10 * high  # with it, perhaps twice
    assert percentile_interval([[1.0, 1.0], [1.0]], 99) == (1.0, 1.0)


@pytest.mark.parametrize("groups", [[], [[1.0], []], [[[1.0]]]])
def test_a_percentile_of_nothing_is_refused(groups: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="groups of values"):
        percentile_interval(groups, 99)
