"""The search for a slower revision, against simulated boards."""

from __future__ import annotations

import numpy as np
import pytest

from harness.bisect.lines import Answer, Line, Outcome, Question
from harness.bisect.performance import PerformanceSearch, Settings, credible
from tests.planted.benches.revisions import REPEATS, SHORT, Speed


def searched(
    speed: Speed, settings: Settings | None = None, line: Line | None = None
) -> tuple[Answer, list[Question]]:
    search = PerformanceSearch(line or Line([str(at) for at in range(SHORT + 1)]), settings)
    asked: list[Question] = []
    while isinstance(move := search.ask(), Question):
        assert search.ask() == move  # asking changes nothing
        asked.append(move)
        search.tell(move, speed.visit(move.position, REPEATS))
    return move, asked


def test_three_percent_among_64_commits_are_named_in_fewer_than_100_visits() -> None:
    right, visits = 0, []
    for seed in range(10):
        speed = Speed(np.random.default_rng(seed), 0.03)
        answer, _ = searched(speed)
        right += answer.outcome is Outcome.NAMED and answer.positions == (speed.culprit,)
        visits.append(speed.visits)
    assert right >= 9
    assert np.mean(visits) < 100


def test_two_equal_revisions_are_not_told_apart_whatever_the_noise() -> None:
    for seed in range(5):
        answer, _ = searched(Speed(np.random.default_rng(100 + seed), 0.0))
        assert answer.outcome is Outcome.BAD_PASSES
        assert answer.positions == ()


def test_a_revision_that_is_faster_is_no_regression() -> None:
    answer, _ = searched(Speed(np.random.default_rng(5), -0.1))
    assert answer.outcome is Outcome.BAD_PASSES


def test_the_same_answers_lead_to_the_same_questions() -> None:
    first = searched(Speed(np.random.default_rng(3), 0.05))
    assert searched(Speed(np.random.default_rng(3), 0.05)) == first


def test_every_fifth_visit_of_the_search_goes_to_the_good_revision() -> None:
    _, asked = searched(Speed(np.random.default_rng(11), 0.03))
    phases = [question.phase for question in asked if question.phase in ("search", "good")]
    gap = 0
    for phase in phases:
        gap = 0 if phase == "good" else gap + 1
        assert gap <= 4
    assert "good" in phases


def test_a_board_that_changes_under_the_search_ends_it_as_environment() -> None:
    speed = Speed(np.random.default_rng(2), 0.03)
    search = PerformanceSearch(Line([str(at) for at in range(SHORT + 1)]))
    searching = False
    while isinstance(move := search.ask(), Question):
        searching = searching or move.phase == "search"
        factor = 1.2 if searching else 1.0  # a fan died when the search began
        search.tell(move, [factor * value for value in speed.visit(move.position, REPEATS)])
    assert move.outcome is Outcome.ENVIRONMENT
    assert move.positions == ()
    assert "moved by" in move.sentence


def test_a_board_that_drifts_by_itself_is_seen_through_and_nobody_is_blamed_for_it() -> None:
    right, wrong = 0, 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        speed = Speed(rng, 0.1)
        search = PerformanceSearch(Line([str(at) for at in range(SHORT + 1)]))
        level = 0.0
        while isinstance(move := search.ask(), Question):
            level += 0.015 * rng.standard_normal()  # of the order of 10 % in the search
            found = speed.visit(move.position, REPEATS)
            search.tell(move, [float(np.exp(level)) * value for value in found])
        named = move.outcome is Outcome.NAMED
        right += named and move.positions == (speed.culprit,)
        wrong += named and move.positions != (speed.culprit,)
    assert wrong == 0
    assert right >= 8


def test_one_unlucky_visit_of_the_good_revision_is_no_change_of_the_board() -> None:
    speed = Speed(np.random.default_rng(4), 0.05)
    search = PerformanceSearch(Line([str(at) for at in range(SHORT + 1)]))
    unlucky = 0
    while isinstance(move := search.ask(), Question):
        values = speed.visit(move.position, REPEATS)
        if move.phase == "good" and not unlucky:
            unlucky, values = 1, [1.2 * value for value in values]
        search.tell(move, values)
    assert unlucky
    assert move.outcome is Outcome.NAMED
    assert move.positions == (speed.culprit,)


def test_what_cannot_be_measured_stays_nameable_with_its_successor() -> None:
    speed = Speed(np.random.default_rng(8), 0.2)
    speed.culprit = 30
    search = PerformanceSearch(Line([str(at) for at in range(SHORT + 1)]))
    while isinstance(move := search.ask(), Question):
        if 25 <= move.position < 33:
            search.untestable(move.position)
        else:
            search.tell(move, speed.visit(move.position, REPEATS))
    assert move.outcome is Outcome.RANGE
    assert move.positions == tuple(range(25, 34))


def test_an_end_that_cannot_be_measured_is_told() -> None:
    search = PerformanceSearch(Line("abc"))
    search.untestable(0)
    answer = search.ask()
    assert isinstance(answer, Answer)
    assert answer.outcome is Outcome.UNTESTABLE


def test_equal_builds_at_both_ends_need_no_visit() -> None:
    answer = PerformanceSearch(Line("aba")).ask()
    assert isinstance(answer, Answer)
    assert answer.outcome is Outcome.SAME_BUILD


def test_a_spent_budget_gives_the_interval_and_no_name() -> None:
    speed = Speed(np.random.default_rng(1), 0.03)
    answer, asked = searched(speed, Settings(budget=20))
    assert answer.outcome in (Outcome.INCONCLUSIVE, Outcome.BAD_PASSES)
    assert len(asked) <= 20
    if answer.outcome is Outcome.INCONCLUSIVE:
        assert speed.culprit in answer.positions
        assert len(answer.positions) > 1


def test_the_repeats_of_a_visit_count_once() -> None:
    # Twenty repeats of one lucky visit each: with the luck taken for knowledge, they would name.
    search = PerformanceSearch(Line("abc"))
    search.tell(Question(0, "ends"), [0.0200 + 1e-6 * at for at in range(20)])
    search.tell(Question(2, "ends"), [0.0204 + 1e-6 * at for at in range(20)])
    _, no_change = search.posterior()
    assert no_change > 0.2


def test_values_that_are_no_times_are_refused() -> None:
    search = PerformanceSearch(Line("ab"))
    for values in ([], [0.0], [float("nan")], [-1.0]):
        with pytest.raises(ValueError, match="positive"):
            search.tell(Question(0, "ends"), values)


def test_the_credible_range_is_the_shortest_that_holds_the_confidence() -> None:
    assert list(credible(np.array([0.01, 0.5, 0.45, 0.04]), 0.9)) == [1, 2]
    assert list(credible(np.array([1.0]), 0.99)) == [0]
