"""The search for a revision that fails, against planted failures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.bisect.lines import Answer, Line, Outcome, Question
from harness.bisect.revisions import FailureSearch, Settings
from harness.bisect.trials import Result
from tests.planted.benches.revisions import Plant


def line_of(commits: int) -> Line:
    return Line([str(at) for at in range(commits + 1)])


def searched(
    search: FailureSearch, trial: Callable[[Question], tuple[Result, str | None] | None]
) -> tuple[Answer, list[Question]]:
    """`trial` answers a question; None: that build cannot be tested."""
    asked: list[Question] = []
    while isinstance(move := search.ask(), Question):
        assert search.ask() == move  # asking changes nothing
        asked.append(move)
        answer = trial(move)
        if answer is None:
            search.untestable(move.position)
        else:
            search.tell(move, *answer)
        assert len(asked) < 2000
    return move, asked


def planted(plant: Plant) -> Callable[[Question], tuple[Result, str | None]]:
    def trial(question: Question) -> tuple[Result, str | None]:
        failed = plant.fails(question.position)
        return (Result.FAIL, "it") if failed else (Result.PASS, None)

    return trial


def certain(culprit: int) -> Callable[[Question], tuple[Result, str | None]]:
    return lambda question: (
        (Result.FAIL, "it") if question.position >= culprit else (Result.PASS, None)
    )


def test_a_certain_failure_among_200_commits_takes_20_runs_at_most() -> None:
    for culprit in (1, 2, 77, 128, 199, 200):
        search = FailureSearch(line_of(200), Settings(least_rate=0.5))
        answer, asked = searched(search, certain(culprit))
        assert answer.outcome is Outcome.NAMED
        assert answer.positions == (culprit,)
        assert len(asked) <= 20


def test_a_rare_failure_is_named_for_all_its_luck() -> None:
    right = 0
    for seed in range(6):
        plant = Plant(np.random.default_rng(seed), 60, 0.3, 0.01)
        answer, _ = searched(FailureSearch(line_of(60)), planted(plant))
        right += answer.outcome is Outcome.NAMED and answer.positions == (plant.culprit,)
    assert right >= 5


def test_a_good_revision_that_fails_ends_the_search_before_it_begins() -> None:
    answer, asked = searched(FailureSearch(line_of(20)), certain(0))
    assert answer.outcome is Outcome.GOOD_FAILS
    assert {question.phase for question in asked} == {"bad", "good"}
    assert "failed" in answer.sentence


def test_a_bad_revision_that_passes_ends_the_search_before_it_begins() -> None:
    answer, asked = searched(FailureSearch(line_of(20)), certain(99))
    assert answer.outcome is Outcome.BAD_PASSES
    assert {question.position for question in asked} == {20}
    assert "20%" in answer.sentence


def test_a_background_as_frequent_as_the_failure_names_nothing() -> None:
    for seed in range(3):
        plant = Plant(np.random.default_rng(seed), 30, 0.3, 0.3)
        answer, _ = searched(FailureSearch(line_of(30)), planted(plant))
        assert answer.outcome is not Outcome.NAMED


def test_revisions_that_do_not_build_are_named_with_their_successor() -> None:
    truth = certain(12)
    answer, _ = searched(
        FailureSearch(line_of(30)), lambda q: None if 10 <= q.position < 14 else truth(q)
    )
    assert answer.outcome is Outcome.RANGE
    assert answer.positions == (10, 11, 12, 13, 14)


def test_revisions_that_do_not_build_elsewhere_cost_no_certainty() -> None:
    truth = certain(20)
    answer, _ = searched(
        FailureSearch(line_of(30)), lambda q: None if 5 <= q.position < 19 else truth(q)
    )
    assert answer.outcome is Outcome.NAMED
    assert answer.positions == (20,)


def test_another_failure_in_between_is_neither_for_nor_against() -> None:
    truth = certain(20)
    answer, _ = searched(
        FailureSearch(line_of(30)),
        lambda q: (Result.FAIL, "another") if 8 <= q.position < 12 else truth(q),
    )
    assert answer.outcome is Outcome.NAMED
    assert answer.positions == (20,)


def test_a_good_revision_with_another_failure_cannot_be_tested() -> None:
    answer, _ = searched(
        FailureSearch(line_of(10)),
        lambda q: (Result.FAIL, "it" if q.position >= 5 else "another"),
    )
    assert answer.outcome is Outcome.UNTESTABLE
    assert "another" in answer.sentence


def test_one_build_at_two_revisions_is_tried_as_one() -> None:
    # Every second commit changes nothing on a board.
    line = Line([str(at // 2) for at in range(41)])
    answer, asked = searched(FailureSearch(line), certain(14))
    assert answer.positions == (14,)
    searched_at = [one.position for one in asked if one.phase != "verify"]
    assert all(position % 2 == 0 for position in searched_at)


def test_the_named_revision_and_its_parent_are_tried_afresh() -> None:
    answer, asked = searched(FailureSearch(line_of(64)), certain(40))
    fresh = {question.position for question in asked if question.phase == "verify"}
    assert answer.outcome is Outcome.NAMED
    assert fresh == {39, 40}


def test_a_failure_that_is_gone_when_it_is_looked_at_again_is_unverified() -> None:
    truth = certain(10)

    def trial(question: Question) -> tuple[Result, str | None]:
        return (Result.PASS, None) if question.phase == "verify" else truth(question)

    answer, _ = searched(FailureSearch(line_of(20), Settings(budget=60)), trial)
    assert answer.outcome in (Outcome.UNVERIFIED, Outcome.INCONCLUSIVE)


def test_a_bad_revision_that_mostly_fails_in_another_way_spends_the_budget_and_no_more() -> None:
    answer, asked = searched(
        FailureSearch(line_of(10), Settings(budget=30), signature="it"),
        lambda q: (
            (Result.FAIL, "it") if q.position == 10 and not luck.pop() else (OTHER, "another")
        ),
    )
    assert answer.outcome is Outcome.INCONCLUSIVE
    assert len(asked) == 30


luck = [True] * 60 + [False]
OTHER = Result.OTHER


def test_trouble_of_the_board_is_not_to_be_told() -> None:
    search = FailureSearch(line_of(4))
    with pytest.raises(ValueError, match="did not take place"):
        search.tell(Question(4, "bad"), Result.INFRA)
