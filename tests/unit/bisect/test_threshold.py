"""The noisy threshold search: names with the asked confidence, few trials, honest intervals."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from harness.bisect.threshold import Found, Inconclusive, ThresholdSearch


def drive(
    search: ThresholdSearch, k: int, p: float, q: float = 0.0, seed: int = 0
) -> Found | Inconclusive:
    """Answers as a list does that fails from the prefix k on."""
    chance = random.Random(seed)
    while True:
        move = search.ask()
        if not isinstance(move, int):
            return move
        for _ in range(search.repeats(move)):
            failed = chance.random() < (p if move >= k else q)
            search.tell(move, failed)
            if failed:
                break


@pytest.mark.parametrize("k", [1, 2, 77, 128, 199, 200])
def test_what_fails_for_certain_costs_about_the_logarithm_of_the_list(k: int) -> None:
    found = drive(ThresholdSearch(200), k, p=1.0)
    assert isinstance(found, Found)
    assert found.k == k
    assert found.trials <= 20


def test_what_fails_one_time_in_twenty_is_found_with_the_asked_confidence() -> None:
    ends = []
    for seed in range(10):
        k = 1 + 13 * seed % 200
        search = ThresholdSearch(200, failures=3, trials=60, background=(0, 90))
        ends.append((k, drive(search, k, p=0.05, seed=seed)))
    right = [isinstance(end, Found) and end.k == k for k, end in ends]
    assert sum(right) >= 9
    # 283 trials is what information theory allows on average, were p known.
    assert np.mean([end.trials for _, end in ends]) <= 600


def test_background_failures_are_told_from_the_failure() -> None:
    ends = []
    for seed in range(8):
        search = ThresholdSearch(100, failures=6, trials=20, background=(2, 98))
        ends.append(drive(search, 40, p=0.3, q=0.02, seed=seed))
    assert sum(isinstance(end, Found) and end.k == 40 for end in ends) >= 7


def test_a_spent_budget_ends_with_an_interval_that_holds_the_threshold() -> None:
    search = ThresholdSearch(200, failures=3, trials=60, background=(0, 90), budget=100)
    end = drive(search, 120, p=0.05, seed=3)
    assert isinstance(end, Inconclusive)
    assert end.trials >= 100
    assert end.first <= 120 <= end.last
    assert end.last - end.first < 199
    assert "100 trials" in end.reason
    inside = search.posterior()[end.first : end.last + 1].sum()
    assert inside >= 1 - search.delta - 1e-9


def test_what_lies_between_two_prefixes_that_can_be_tried_is_named_together() -> None:
    allowed = [m for m in range(101) if not 40 <= m < 50]
    found = drive(ThresholdSearch(100, allowed=allowed), 45, p=1.0)
    assert isinstance(found, Found)
    assert (found.first, found.last) == (40, 50)


def test_prefixes_that_cannot_be_tried_are_not_asked_for() -> None:
    search = ThresholdSearch(64, allowed=range(0, 65, 8))
    asked = set()
    while isinstance(move := search.ask(), int):
        asked.add(move)
        search.tell(move, move >= 30)
    assert asked <= set(range(0, 65, 8))


def test_thresholds_without_weight_are_never_named() -> None:
    weights = [0.0, *[float(k % 2 == 0) for k in range(1, 51)], 0.0]
    found = drive(ThresholdSearch(50, weights=weights), 21, p=1.0)
    assert isinstance(found, Found)
    assert found.k % 2 == 0


def test_a_failure_with_nothing_on_or_with_nothing_at_all_can_be_found() -> None:
    weights = [0.3, *[0.4 / 20] * 20, 0.3]
    with_nothing = drive(ThresholdSearch(20, weights=weights), 0, p=1.0)
    never = drive(ThresholdSearch(20, weights=weights), 21, p=1.0)
    assert isinstance(with_nothing, Found)
    assert isinstance(never, Found)
    assert (with_nothing.k, never.k) == (0, 21)


def test_a_search_that_no_trial_can_help_says_so() -> None:
    end = ThresholdSearch(10, allowed=[]).ask()
    assert isinstance(end, Found)  # one interval, that of all thresholds
    assert (end.first, end.last) == (1, 10)
    weights = [0.5, *[0.0] * 10, 0.5]
    same = ThresholdSearch(
        10, failures=3, trials=9, background=(3033, 5967), weights=weights, sigma=1e-3, spread=0
    ).ask()
    assert isinstance(same, Inconclusive)
    assert "equally frequent" in same.reason


def test_the_same_answers_lead_to_the_same_questions_in_one_batch_or_in_many() -> None:
    one, other = (ThresholdSearch(60, failures=2, trials=9) for _ in range(2))
    one.tell(30, False, repeats=7)
    one.tell(45, True)
    other.tell(45, True)
    for _ in range(7):
        other.tell(30, False)
    assert one.ask() == other.ask()
    assert one.posterior() == pytest.approx(other.posterior())


def test_repeats_of_a_rare_failure_are_many_and_of_a_certain_one_few() -> None:
    rare = ThresholdSearch(100, failures=3, trials=100)
    sure = ThresholdSearch(100, failures=10, trials=10)
    assert rare.repeats(50) >= 5
    assert sure.repeats(50) == 1
    before = rare.posterior()
    rare.tell(50, False, repeats=rare.repeats(50))
    odds = before[60] / before[40] * rare.posterior()[40] / rare.posterior()[60]
    assert 0.5 < odds < 1  # such a batch moves no decision


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"n": 0}, "0 elements"),
        ({"n": 5, "delta": 0.7}, "delta 0.7"),
        ({"n": 5, "failures": 4, "trials": 3}, "4 failures in 3 trials"),
        ({"n": 5, "weights": [1.0] * 6}, "expected 7 numbers"),
        ({"n": 5, "weights": [0.0] * 7}, "weight 0"),
        ({"n": 5, "allowed": [6]}, "prefix 6"),
    ],
)
def test_impossible_searches_are_refused(arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        ThresholdSearch(**arguments)


def test_a_prefix_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix 11"):
        ThresholdSearch(10).tell(11, True)
