"""The search for a race on simulated boards: right names in few trials, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from harness.bisect.race import MOST_INFRA, Outcome, RaceSearch, Verdict
from harness.bisect.sets import Evidence, Rate, Setting, minimal_set
from harness.bisect.trials import Result
from tests.planted.worlds import Planted, World, search, steps_of

STEPS = steps_of(200)


def world(*planted: Planted, seed: int = 0, **more: float) -> World:
    return World(STEPS, list(planted), random.Random(seed), **more)


def race(*numbers: int, p: float, raised: float | None = None) -> Planted:
    return Planted(frozenset(STEPS[number] for number in numbers), p, raised)


def names(verdict: Verdict) -> set[frozenset[str]]:
    return {frozenset(found.steps) for found in verdict.races}


def test_a_race_that_always_shows_takes_some_twenty_trials() -> None:
    trials = []
    for number in (0, 1, 77, 150, 199):
        verdict, count = search(world(race(number, p=1.0)), delta=0.01, budget=500, delays=True)
        assert names(verdict) == {frozenset({STEPS[number]})}
        trials.append(count)
    assert np.mean(trials) <= 22


def test_delays_find_a_rare_race_in_few_trials() -> None:
    right, trials = 0, []
    for seed in range(12):
        rare = race(7 + 16 * seed, p=0.05, raised=0.4 + 0.05 * (seed % 12))
        verdict, count = search(world(rare, seed=seed), delta=0.01, budget=2000, delays=True)
        right += names(verdict) == {rare.steps}
        trials.append(count)
    assert right == 12
    assert np.mean(trials) <= 150


def test_without_delays_a_rare_race_is_found_all_the_same() -> None:
    trials = []
    for seed in range(5):
        rare = race(30 + 31 * seed, p=0.05)
        verdict, count = search(world(rare, seed=seed), delta=0.01, budget=3000, delays=False)
        assert names(verdict) == {rare.steps}
        (found,) = verdict.races
        assert found.probability >= 0.98
        assert found.alone[0] >= 3
        assert found.without[0] == 0
        trials.append(count)
    assert np.mean(trials) <= 750


def test_what_was_likeliest_is_told_when_the_search_has_ended() -> None:
    place = world(race(77, p=1.0))
    found = RaceSearch(STEPS, delta=0.01, budget=500, delays=True)
    while not isinstance(question := found.ask(), Verdict):
        found.tell(*place.trial(question.configuration))
    assert found.posterior() is None
    steps, shares = found.posterior(ended=True) or ((), np.empty(0))
    assert steps[int(shares.argmax())] == STEPS[77]
    assert shares.max() > 0.5  # what confirms it comes later


def test_of_a_pair_both_members_are_named_and_no_more() -> None:
    for seed in range(2):
        pair = race(20 + 50 * seed, 130 + seed, p=0.2)
        verdict, _ = search(world(pair, seed=seed), delta=0.01, budget=3000, delays=False)
        assert names(verdict) == {pair.steps}


def test_a_member_that_is_not_needed_is_dropped_and_one_that_is_stays() -> None:
    one, other, idle = STEPS[3], STEPS[90], STEPS[150]
    place = world(Planted(frozenset({one, other}), 0.5))
    asking = minimal_set(
        Evidence(1000),
        Setting(STEPS, frozenset(), 0.01),
        [idle, one, other],
        lambda fixed: (Rate(10, 10), Rate(0, 50, (0.5, 100.0))),
    )
    question = next(asking)
    while True:
        failed = place.fails(question.configuration.on)
        try:
            question = asking.send((1, 0) if failed else (0, 1))
        except StopIteration as end:
            kept, needed = end.value
            break
    assert kept == [one, other]
    assert needed >= 0.98


def test_two_races_are_named_one_after_the_other() -> None:
    one, other = race(11, p=0.05, raised=0.6), race(160, p=0.1, raised=0.8)
    verdict, _ = search(world(one, other), delta=0.01, budget=2000, delays=True)
    assert names(verdict) == {one.steps, other.steps}


@pytest.mark.parametrize("background", [0.0, 0.02])
def test_where_nothing_races_nothing_is_blamed(background: float) -> None:
    for seed in range(4):
        verdict, _ = search(
            world(seed=seed, background=background), delta=0.01, budget=2000, delays=True
        )
        assert not verdict.races
        assert verdict.outcome in (
            Outcome.NOT_REPRODUCED,
            Outcome.NOT_A_RACE,
            Outcome.BACKGROUND,
            Outcome.INCONCLUSIVE,
        )


def test_what_fails_synchronously_as_well_is_no_race() -> None:
    verdict, count = search(world(background=0.4), delta=0.01, budget=2000, delays=True)
    assert verdict.outcome is Outcome.NOT_A_RACE
    assert "accuracy or triage" in verdict.reason
    assert count < 60


def test_a_race_is_named_although_something_else_fails_now_and_then() -> None:
    found = race(42, p=0.3, raised=0.6)
    verdict, _ = search(world(found, background=0.02), delta=0.01, budget=3000, delays=True)
    assert names(verdict) == {found.steps}


def test_a_race_that_another_step_hides_is_not_reproduced() -> None:
    hidden = Planted(frozenset({STEPS[9]}), 0.5, 0.6, frozenset({STEPS[120]}))
    verdict, _ = search(world(hidden), delta=0.01, budget=2000, delays=True)
    assert verdict.outcome is Outcome.NOT_REPRODUCED
    assert not verdict.races


def test_a_spent_budget_leaves_an_interval_that_holds_the_step() -> None:
    verdict, count = search(world(race(77, p=0.05)), delta=0.01, budget=260, delays=False)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "260 trials" in verdict.reason
    assert count == 260
    assert STEPS[77] in verdict.interval
    assert len(verdict.interval) < 200


def test_lost_boards_are_tried_again_and_move_nothing() -> None:
    quiet, _ = search(world(race(63, p=1.0)), delta=0.01, budget=500, delays=True)
    lossy, trials = search(
        world(race(63, p=1.0), lost=0.3, seed=1), delta=0.01, budget=500, delays=True
    )
    assert lossy == quiet
    assert trials < 30


def test_a_board_that_stays_lost_ends_the_search_by_name() -> None:
    verdict, _ = search(world(race(63, p=1.0), lost=1.0), delta=0.01, budget=500, delays=True)
    assert verdict.outcome is Outcome.BOARD_LOST


def test_a_failure_that_changes_is_told_and_not_searched_for() -> None:
    found = RaceSearch(STEPS)
    found.tell(Result.FAIL, "wrong numbers")
    while not isinstance(found.ask(), Verdict):
        found.tell(Result.FAIL, "died by SIGSEGV")
    verdict = found.ask()
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is Outcome.CHANGED
    assert "wrong numbers" in verdict.reason


def test_another_failure_now_and_then_does_not_mislead() -> None:
    found = race(99, p=0.9)
    verdict, _ = search(world(found, other=0.1, seed=3), delta=0.01, budget=500, delays=True)
    assert names(verdict) == {found.steps}


def test_a_missing_edge_of_the_schedule_itself_costs_no_trial() -> None:
    verdict = RaceSearch(STEPS, findings=["RAW: b may read x before it is written by a"]).ask()
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is Outcome.STATIC
    assert verdict.findings


def test_told_the_same_trials_again_a_search_stands_where_it_stood() -> None:
    """Which is how an interrupted one goes on."""
    one, place = RaceSearch(STEPS), world(race(140, p=0.3, raised=0.7), seed=5)
    told: list[tuple[Result, str | None]] = []
    for _ in range(40):
        question = one.ask()
        assert not isinstance(question, Verdict)
        told.append(place.trial(question.configuration))
        one.tell(*told[-1])
    again = RaceSearch(STEPS)
    for item in told:
        again.tell(*item)
    assert again.ask() == one.ask()
    assert again.trials == one.trials


def test_a_question_that_was_partly_answered_asks_for_the_rest() -> None:
    found = RaceSearch(STEPS, delays=False)
    for _ in range(4):  # three passes: it is rare; then many repeats
        found.tell(Result.PASS)
    question = found.ask()
    assert not isinstance(question, Verdict)
    found.tell(Result.PASS)
    rest = found.ask()
    assert not isinstance(rest, Verdict)
    assert rest.configuration == question.configuration
    assert rest.repeats == question.repeats - 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: RaceSearch([]),
        lambda: RaceSearch(["a", "a"]),
        lambda: RaceSearch(["a"], delta=0.9),
        lambda: RaceSearch(["a"], budget=0),
    ],
)
def test_impossible_searches_are_refused(make: Callable[[], RaceSearch]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_a_search_that_is_over_takes_no_more_trials() -> None:
    found = RaceSearch(["a", "b"])
    for _ in range(MOST_INFRA):
        found.tell(Result.INFRA)
    with pytest.raises(ValueError, match="over"):
        found.tell(Result.PASS)
