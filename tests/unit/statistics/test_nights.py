"""Nights: the screen, the environment, noise floors, the ledger."""

from __future__ import annotations

import numpy as np
import pytest

from harness.statistics.nights import environment, ledger, noise_floor, screen


def nights(rng: np.random.Generator, count: int, sd: float = 0.015) -> list[float]:
    """Medians of three processes a night, with heavy tails, on a board's own level."""
    return [float(v) for v in 50 * np.exp(rng.standard_t(4, count) * sd / np.sqrt(2))]


def test_a_clean_series_is_suspected_in_two_to_three_nights_of_a_hundred() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1500):
        *before, tonight = nights(rng, 16)
        hits += bool(screen(before, tonight).suspect)
    assert hits / 1500 <= 0.035


def test_a_slowdown_of_five_percent_is_suspected_the_first_night() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        *before, tonight = nights(rng, 16)
        hits += bool(screen(before, tonight * 1.05).suspect)
    assert hits / 300 >= 0.8


def test_an_improvement_is_never_suspected() -> None:
    rng = np.random.default_rng(3)
    *before, tonight = nights(rng, 16)
    assert screen(before, tonight * 0.8).suspect is False
    assert screen(before, tonight * 0.8, larger_is_better=True).suspect is True


@pytest.mark.parametrize("before", [[], [1, 2, 3, 4], [1, 1, 1, float("nan"), 0, -1]])
def test_too_few_nights_tell_nothing(before: list[float]) -> None:
    assert screen(before, 2.0).suspect is None


def test_nights_without_any_noise_are_still_compared() -> None:
    assert screen([2.0] * 6, 2.0).suspect is False
    assert screen([2.0] * 6, 2.1).suspect is True


def test_a_board_whose_series_move_together_has_another_environment() -> None:
    floors = dict.fromkeys("abcde", 0.01)
    moved = environment({"a": 0.05, "b": 0.04, "c": 0.06, "d": 0.0, "e": 0.001}, floors)
    assert moved.shifted and moved.direction == "worse" and moved.share == pytest.approx(0.6)
    alone = environment({"a": 0.2, "b": 0.0, "c": 0.001, "d": 0.0, "e": 0.0}, floors)
    assert not alone.shifted
    apart = environment({"a": 0.05, "b": -0.05, "c": 0.05, "d": -0.05, "e": 0.05}, floors)
    assert apart.shifted and apart.share == pytest.approx(0.6)
    assert not environment({"a": 0.5, "b": 0.5}, floors).shifted  # two series are no majority


def test_clean_boards_seldom_look_like_a_moved_environment() -> None:
    rng = np.random.default_rng(4)
    floors = dict.fromkeys("abcdef", 0.015)
    hits = sum(
        environment(dict(zip("abcdef", rng.standard_t(4, 6) * 0.011, strict=True)), floors).shifted
        for _ in range(1000)
    )
    assert hits <= 10


def test_the_noise_floor_is_of_equal_nights_and_a_step_between_versions_is_no_noise() -> None:
    rng = np.random.default_rng(5)
    values = [*nights(rng, 60), *[1.5 * v for v in nights(rng, 60)]]
    versions = ["a"] * 60 + ["b"] * 60
    floor = noise_floor(values, versions)
    assert floor.pairs == 118
    assert floor.sd == pytest.approx(0.013, rel=0.35)
    assert floor.detectable == pytest.approx(4 * (floor.sd or 0))
    assert noise_floor(values, [str(n) for n in range(120)]).sd is None
    odd = [*values[:10], 500.0, *values[11:]]
    assert noise_floor(odd, versions).sd == pytest.approx(floor.sd, rel=0.1)


def test_the_ledger_tells_how_often_a_detector_was_right() -> None:
    alerts = [("screen", True), ("screen", False), ("screen", None), ("leak", True)]
    screened, leak = ledger(alerts)
    assert (screened.detector, screened.alerts, screened.precision) == ("screen", 3, 0.5)
    assert (screened.right, screened.wrong, screened.open) == (1, 1, 1)
    assert leak.precision == 1.0
    assert ledger([("step", None)])[0].precision is None
