"""Leaks and drift: verdicts on simulated stress runs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.signal import lfilter

from harness.statistics.drift import judge_drift
from harness.statistics.leaks import judge_leak, mann_kendall_p

Array = npt.NDArray[np.float64]


def clean_memory(rng: np.random.Generator, minutes: float) -> tuple[Array, Array]:
    """A warm-up of 30 MB, then noise of 2 MB that takes a minute to forget itself, at 1 Hz."""
    t = np.arange(minutes * 60.0)
    memory = np.exp(-1 / 60)
    steps = rng.standard_normal(len(t)) * 2 * np.sqrt(1 - memory**2)
    noise: Array = lfilter([1.0], [1.0, -memory], steps)
    return t, 300 + 30 * (1 - np.exp(-t / 90)) + noise


def test_clean_runs_are_called_leaking_in_few_of_a_hundred() -> None:
    rng = np.random.default_rng(1)
    verdicts = [judge_leak(*clean_memory(rng, 30)).verdict for _ in range(200)]
    # Least squares with independent samples calls most of these a leak.
    assert verdicts.count("leak") <= 6
    assert verdicts.count("too short to tell") == 0


def test_a_leak_of_a_megabyte_a_minute_is_found() -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(100):
        t, rss = clean_memory(rng, 30)
        verdict = judge_leak(t, rss + t / 60)
        found += verdict.verdict == "leak"
    assert found >= 95


def test_the_growth_of_a_leak_is_measured() -> None:
    t, rss = clean_memory(np.random.default_rng(3), 30)
    verdict = judge_leak(t, rss + 2 * t / 60)
    assert verdict.growth_mb == pytest.approx(50, rel=0.15)
    assert verdict.mb_per_hour == pytest.approx(120, rel=0.15)
    assert verdict.p is not None
    assert verdict.p < 1e-4


def test_an_allocator_that_fills_its_pools_is_no_leak() -> None:
    t = np.arange(1800.0)
    verdict = judge_leak(t, 300 + 120 * (1 - np.exp(-t / 300)))
    assert verdict.verdict == "none"
    assert "dies down" in verdict.reason
    assert verdict.warm_up_s == 600


def test_growth_below_five_megabytes_is_no_leak() -> None:
    t = np.arange(1800.0)
    verdict = judge_leak(t, 300 + 4 * t / 1800)
    assert verdict.verdict == "none"
    assert "less than" in verdict.reason


def test_memory_that_never_changes_is_no_leak() -> None:
    verdict = judge_leak(np.arange(1800.0), np.full(1800, 250.0))
    assert (verdict.verdict, verdict.growth_mb) == ("none", 0.0)


@pytest.mark.parametrize("seconds", [0, 1, 60, 880])
def test_a_short_run_is_too_short_to_tell(seconds: int) -> None:
    t = np.arange(float(seconds))
    verdict = judge_leak(t, 300 + t)
    assert verdict.verdict == "too short to tell"
    assert verdict.growth_mb is None


def test_samples_that_are_missing_for_minutes_leave_too_little() -> None:
    t = np.arange(1800.0)
    rss = np.where((t > 900) & (t < 1500), np.nan, 300.0)
    assert judge_leak(t, rss).verdict == "too short to tell"


def test_a_restarted_process_is_judged_by_its_longest_life() -> None:
    t = np.arange(2400.0)
    attempt = np.where(t < 300, 0, 1)
    grows_again = 300 + np.where(t < 300, t, t - 300) / 60
    verdict = judge_leak(t, grows_again, attempt)
    assert verdict.verdict == "leak"
    assert verdict.judged_s == pytest.approx(1800, abs=2)


def test_the_trend_test_is_exact() -> None:
    for n in (3, 5, 6):
        orders = [list(order) for order in itertools.permutations(range(n))]
        scores = np.array([_score(order) for order in orders])
        for order in orders[:: max(1, len(orders) // 40)]:
            assert mann_kendall_p(order) == pytest.approx(float(np.mean(scores >= _score(order))))


def _score(values: list[int]) -> int:
    return sum(int(np.sign(b - a)) for a, b in itertools.combinations(values, 2))


def test_ties_never_make_the_trend_test_find_more() -> None:
    rng = np.random.default_rng(4)
    samples = rng.integers(0, 3, (4000, 10))  # many ties, no trend
    assert np.mean([mann_kendall_p(sample) < 0.05 for sample in samples]) <= 0.05


def speeds(rng: np.random.Generator, late: float, minutes: float = 30) -> tuple[Array, Array]:
    t = np.arange(minutes * 60.0)
    speed: Array = (12 * np.where(t > t[-1] / 2, late, 1.0)) * (
        1 + 0.03 * rng.standard_normal(len(t))
    )
    speed[rng.random(len(t)) < 0.3] = 0.0  # idle gaps
    return t, speed


def test_steady_speed_with_idle_gaps_is_no_drift() -> None:
    rng = np.random.default_rng(5)
    verdicts = [judge_drift(*speeds(rng, 1.0)) for _ in range(100)]
    assert not any(verdict.drifts for verdict in verdicts)
    assert all(abs((verdict.ratio or 0) - 1) < 0.02 for verdict in verdicts)


def test_a_tenth_less_speed_at_the_end_is_drift() -> None:
    rng = np.random.default_rng(6)
    assert all(judge_drift(*speeds(rng, 0.9)).drifts for _ in range(100))
    assert judge_drift(*speeds(rng, 0.9)).ratio == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("minutes", [0, 1, 9])
def test_drift_of_a_short_run_cannot_be_told(minutes: int) -> None:
    drift = judge_drift(*speeds(np.random.default_rng(7), 0.5, minutes)) if minutes else None
    empty: list[Any] = []
    assert (drift or judge_drift(empty, empty)).ratio is None


def test_drift_of_an_idle_end_cannot_be_told() -> None:
    t, speed = speeds(np.random.default_rng(8), 1.0)
    speed[t > 1400] = 0
    drift = judge_drift(t, speed)
    assert drift.drifts is None
    assert "late busy samples" in drift.reason
