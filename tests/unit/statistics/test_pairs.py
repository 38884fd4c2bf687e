"""A against B in interleaved pairs: how often it is wrong, and what it finds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from harness.statistics.pairs import (
    compare,
    interval,
    order,
    plan,
    sign_flip_p,
)

Array = npt.NDArray[np.float64]
TRIES = 300


def pairs(
    rng: np.random.Generator, effect: float, count: int = 10, sd: float = 0.01
) -> tuple[Array, Array]:
    """Times of A and B taken in turns on a board that gets slower by 10 % meanwhile, with noise of
    heavy tails that remembers itself."""
    letters = order(count)
    noise = rng.standard_t(4, 2 * count) * sd / math.sqrt(2)
    for at in range(1, len(noise)):
        noise[at] += 0.5 * noise[at - 1]
    drift = np.linspace(0, 0.1, 2 * count)
    is_b = np.array(list(letters)) == "B"
    times = np.exp(noise + drift) * np.where(is_b, 1 + effect, 1)
    return times[~is_b], times[is_b]  # a pair has one of each


def verdicts(seed: int, effect: float, **more: float) -> list[str]:
    rng = np.random.default_rng(seed)
    return [compare(*pairs(rng, effect, **more)).verdict for _ in range(TRIES)]  # type: ignore[arg-type]  # count and sd


def test_equal_versions_are_told_apart_in_at_most_a_hundredth_of_tries() -> None:
    found = verdicts(1, 0.0, sd=0.02)
    assert found.count("better") + found.count("worse") <= 0.01 * TRIES + 3


def test_a_slowdown_of_three_percent_is_found() -> None:
    assert verdicts(2, 0.03, sd=0.01).count("worse") >= 0.9 * TRIES
    assert verdicts(3, -0.03, sd=0.01).count("better") >= 0.9 * TRIES


def test_all_of_a_first_is_wrong_where_turns_are_right() -> None:
    """The reason for ABBA: the same drift, measured as AAAA BBBB."""
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(50):
        times = np.exp(rng.standard_normal(20) * 0.01 + np.linspace(0, 0.1, 20))
        wrong += compare(times[:10], times[10:]).verdict == "worse"
    assert wrong >= 45


def test_a_quiet_board_tells_that_nothing_changed_and_a_noisy_one_that_it_cannot() -> None:
    assert verdicts(5, 0.0, sd=0.002).count("equivalent") >= 0.95 * TRIES
    noisy = compare(*pairs(np.random.default_rng(6), 0.0, sd=0.05))
    assert (noisy.verdict, noisy.more) == ("unknown", 10)
    assert "10 more pairs may tell" in noisy.sentence


def test_a_significant_difference_of_less_than_a_percent_is_none() -> None:
    a = np.ones(10)
    b = 1.005 * np.exp(np.linspace(-1e-4, 1e-4, 10))
    assert sign_flip_p(np.log(b / a)) < 0.01
    assert compare(a, b).verdict == "equivalent"


def test_more_of_what_is_better_when_larger_is_better() -> None:
    a, b = np.ones(10), np.linspace(1.05, 1.06, 10)
    assert compare(a, b).verdict == "worse"  # seconds
    assert compare(a, b, larger_is_better=True).verdict == "better"  # tokens per second


def test_the_sign_flip_test_counts_every_choice_of_signs() -> None:
    rng = np.random.default_rng(7)
    for n in range(1, 9):
        x = rng.standard_normal(n) + 0.5
        sums = [abs(np.dot(signs, x)) for signs in itertools.product((-1, 1), repeat=n)]
        expected = np.mean(np.array(sums) >= abs(x.sum()) * (1 - 1e-12))
        assert sign_flip_p(x) == pytest.approx(expected)
    assert sign_flip_p(np.ones(10)) == 2 / 2**10


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(8)
    held = 0
    for _ in range(500):
        low, high = interval(rng.standard_normal(10) + 0.3, 0.9)
        held += low <= 0.3 <= high
    assert 0.87 <= held / 500 <= 0.95
    assert interval([0.1, 0.2], 0.99) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([1, 2], [1], "two arrays of one length"),
        ([1, 0], [1, 1], "must be positive"),
        ([1] * 21, [1] * 21, "at most 20"),
    ],
)
def test_what_is_no_pairs_is_refused(a: list[float], b: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare(a, b)


def test_few_pairs_never_decide_and_say_how_many_are_missing() -> None:
    few = compare([1.0] * 4, [1.2] * 4)
    assert (few.verdict, few.more) == ("unknown", 6)
    assert compare([], []).more == 10


def test_the_plan_says_how_many_pairs_find_a_difference_and_what_cannot_be_found() -> None:
    quiet = plan(0.05, 0.01, seconds_per_pair=84)
    assert quiet.enough and quiet.pairs == 8
    assert quiet.minutes == pytest.approx(8 * 84 / 60)
    middle = plan(0.02, 0.012)
    assert middle.enough and 8 < middle.pairs <= 14
    noisy = plan(0.02, 0.06)
    assert not noisy.enough and "cannot be found reliably" in noisy.sentence
    with pytest.raises(ValueError, match="is none"):
        plan(0.005, 0.01)


def test_turns_balance_a_linear_drift() -> None:
    letters = order(10)
    assert letters[:8] == "ABBAABBA"
    places = {letter: [n for n, c in enumerate(letters) if c == letter] for letter in "AB"}
    assert np.mean(places["A"]) == np.mean(places["B"])
    assert {"".join(sorted(letters[at : at + 2])) for at in range(0, 20, 2)} == {"AB"}
