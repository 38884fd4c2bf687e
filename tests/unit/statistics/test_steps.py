"""Steps in latency curves: how often a clean curve gets one, how often a real one is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.statistics.steps import fit_curve

LENGTHS = np.linspace(64, 2048, 32).astype(np.int64)  # (32,)


@dataclasses.dataclass
class Measured:
    """Points of a simulated run in the order of time, (N,) each."""

    length: npt.NDArray[Any]
    tpot_ms: npt.NDArray[Any]
    sweep: npt.NDArray[Any]
    started_s: npt.NDArray[Any]

    def times(self, factor: npt.ArrayLike) -> Measured:
        return dataclasses.replace(self, tpot_ms=self.tpot_ms * factor)

    def fit(self) -> Any:
        return fit_curve(self.length, self.tpot_ms, self.sweep, self.started_s)


def measure(
    rng: np.random.Generator,
    *,
    noise: float = 0.01,
    sweeps: int = 3,
    lengths: npt.NDArray[Any] = LENGTHS,
    shuffled: bool = True,
) -> Measured:
    """50 ms and 10 µs a position, measured in shuffled sweeps one second apart."""
    orders = [
        rng.permutation(len(lengths)) if shuffled else np.arange(len(lengths))
        for _ in range(sweeps)
    ]
    length = lengths[np.concatenate(orders)]
    tpot = (50 + 0.01 * length) * (1 + noise * rng.standard_normal(len(length)))
    sweep = np.repeat(np.arange(sweeps), len(lengths))
    return Measured(length, tpot, sweep, np.arange(len(length), dtype=np.float64))


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_clean_curves_of_32_points_get_a_jump_in_at_most_one_of_a_hundred(noise: float) -> None:
    rng = np.random.default_rng(20260101)
    trials = 250
    false = sum(bool(measure(rng, noise=noise).fit().jumps) for _ in range(trials))
    # 1 % expected at most: of 250, more than 6 has a probability of 1 %.
    assert false <= 6


def test_five_percent_steps_are_found_at_one_percent_noise() -> None:
    rng = np.random.default_rng(2)
    trials, found, exact = 100, 0, 0
    for _ in range(trials):
        at = int(LENGTHS[rng.integers(4, 28)])
        run = measure(rng)
        jumps = run.times(np.where(run.length >= at, 1.05, 1.0)).fit().jumps
        found += len(jumps) == 1 and jumps[0].cause == "engine"
        exact += len(jumps) == 1 and jumps[0].length == at
    assert found >= 0.93 * trials
    assert exact >= 0.9 * trials


def test_one_sweep_finds_the_step_but_cannot_name_its_cause() -> None:
    rng = np.random.default_rng(3)
    run = measure(rng, sweeps=1, noise=0.005)
    fit = run.times(np.where(run.length >= 1024, 1.08, 1.0)).fit()
    assert [(jump.length, jump.cause) for jump in fit.jumps] == [(1024, "unclear")]


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_slower_clock_from_some_moment_on_is_throttling(shuffled: bool) -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        run = measure(rng, shuffled=shuffled)
        fit = run.times(np.where(run.started_s >= 45, 1.1, 1.0)).fit()
        assert [jump.cause for jump in fit.jumps] == ["throttling"]
        assert fit.jumps[0].length == run.length[45]
        assert fit.jumps[0].ratio == pytest.approx(1.1, abs=0.02)
        # The curve below it is as it would have been at the first clock.
        assert fit.model == "affine"
        assert fit.intercept_ms == pytest.approx(50, rel=0.02)


def test_throttling_that_comes_and_goes_leaves_no_step_of_the_engine() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        run = measure(rng)
        pause = (run.started_s > 30) & (run.started_s < 60)
        causes = [jump.cause for jump in run.times(np.where(pause, 1.1, 1.0)).fit().jumps]
        assert causes == ["throttling", "throttling"]


def test_an_engine_step_and_throttling_in_one_run_are_told_apart() -> None:
    rng = np.random.default_rng(6)
    for _ in range(10):
        run = measure(rng)
        slower = np.where(run.length >= 1088, 1.08, 1.0) * np.where(run.started_s >= 50, 1.1, 1.0)
        jumps = run.times(slower).fit().jumps
        assert sorted(jump.cause for jump in jumps) == ["engine", "throttling"]
        assert next(jump.length for jump in jumps if jump.cause == "engine") == 1088


def test_each_stair_of_a_tile_size_is_found() -> None:
    rng = np.random.default_rng(7)
    run = measure(rng)
    stairs = 1 + 0.1 * sum(np.where(run.length >= at, 1.0, 0.0) for at in (512, 1024, 1536))
    jumps = run.times(stairs).fit().jumps
    assert [jump.length for jump in jumps] == [512, 1024, 1536]
    assert {jump.cause for jump in jumps} == {"engine"}
    assert [jump.ratio for jump in jumps] == pytest.approx([1.1, 1.2 / 1.1, 1.3 / 1.2], abs=0.03)


@pytest.mark.parametrize(
    "shape",
    [
        lambda run: 1 + 0.3 * (run.length / 2048) ** 2,
        lambda run: (run.length / 64.0) ** 0.7,
        lambda run: 1 + 0.04 * run.started_s / 96,  # slowly getting warm
    ],
    ids=["quadratic", "power", "drift"],
)
def test_what_bends_smoothly_has_no_step(shape: Any) -> None:
    rng = np.random.default_rng(8)
    runs = [measure(rng) for _ in range(40)]
    assert sum(bool(run.times(shape(run)).fit().jumps) for run in runs) <= 2


def test_heavy_tailed_noise_rarely_looks_like_a_step() -> None:
    rng = np.random.default_rng(9)
    trials, false = 80, 0
    for _ in range(trials):
        run = measure(rng, noise=0)
        false += bool(run.times(1 + 0.01 * rng.standard_t(3, len(run.length))).fit().jumps)
    assert false <= 3


def test_a_kink_is_named_and_is_no_jump() -> None:
    run = measure(np.random.default_rng(10), noise=0.003)
    fit = run.times(1 + 0.2 * np.maximum(run.length - 1024, 0) / 1024).fit()
    assert fit.model == "kink"
    assert fit.jumps == ()
    assert fit.delta_bic > 10


def test_an_affine_curve_gives_its_intercept_and_slope() -> None:
    fit = measure(np.random.default_rng(11), noise=0.002).fit()
    assert fit.model == "affine"
    assert fit.delta_bic == 0
    assert fit.intercept_ms == pytest.approx(50, rel=0.005)
    assert fit.slope_us_per_position == pytest.approx(10, rel=0.1)
    assert [length for length, _ in fit.fitted] == LENGTHS.tolist()


def test_exact_data_has_exact_results() -> None:
    clean = measure(np.random.default_rng(12), noise=0)
    assert clean.fit().jumps == ()
    fit = clean.times(np.where(clean.length >= 1024, 1.04, 1.0)).fit()
    assert [jump.length for jump in fit.jumps] == [1024]
    assert fit.jumps[0].ratio == pytest.approx(1.04, abs=0.005)


def test_a_step_below_three_percent_is_not_reported() -> None:
    run = measure(np.random.default_rng(13), noise=0.001)
    assert run.times(np.where(run.length >= 1024, 1.025, 1.0)).fit().jumps == ()


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_a_curve_of_few_lengths_is_affine(count: int) -> None:
    run = measure(np.random.default_rng(14), lengths=LENGTHS[:count])
    assert run.times(np.where(run.length >= LENGTHS[count // 2], 1.5, 1.0)).fit().model == "affine"


def test_what_is_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="two different lengths"):
        fit_curve([64, 64], [1.0, 1.1], [0, 1], [0.0, 1.0])
    with pytest.raises(ValueError, match="finite and positive"):
        fit_curve([64, 128], [1.0, float("nan")], [0, 0], [0.0, 1.0])
    with pytest.raises(ValueError, match="one length"):
        fit_curve([64, 128], [1.0], [0, 0], [0.0, 1.0])
