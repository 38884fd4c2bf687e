"""How answers to planted faults are scored."""

from __future__ import annotations

import pytest

from tests.planted.cases import Case, Target
from tests.planted.scores import judge, scores


def case(truth: str, named: str, **more: object) -> Case:
    return Case("race", frozenset(truth.split()), frozenset(named.split()), 10, **more)  # type: ignore[arg-type]  # fields of a Case


@pytest.mark.parametrize(
    ("truth", "named", "verdict"),
    [
        ("a", "a", "exact"),
        ("a b", "a b", "exact"),
        ("a", "a b", "superset"),
        ("a b", "a", "wrong"),
        ("a", "b", "wrong"),
        ("a", "", "inconclusive"),
        ("", "", "clean"),
        ("", "a", "wrong"),
    ],
)
def test_an_answer_is_exact_more_than_that_wrong_or_none(
    truth: str, named: str, verdict: str
) -> None:
    assert case(truth, named).verdict == verdict


def test_shares_bounds_and_calibration_are_of_one_kind_and_contestant() -> None:
    rows = scores(
        [
            case("a", "a", claimed=0.9),
            case("a", "b", claimed=0.99),
            case("a", ""),
            case("a", "b", contestant="git bisect"),
        ]
    )
    ours, git = rows
    assert (ours.cases, ours.exact, ours.wrong, ours.inconclusive) == (3, 1 / 3, 1 / 3, 1 / 3)
    assert ours.wrong_high == pytest.approx(0.792, abs=0.001)  # Wilson, 1 of 3
    assert (ours.claimed, ours.observed) == (pytest.approx(0.945), 0.5)
    assert (git.contestant, git.wrong, git.claimed) == ("git bisect", 1.0, None)


def test_a_target_speaks_of_our_own_cases_and_is_missed_without_any() -> None:
    rows = scores([case("a", "a"), case("a", "b", contestant="git bisect")])
    met, missed = judge(
        [Target("race", "exact", at_least=0.98), Target("pair", "exact", at_least=0.95)], rows
    )
    assert met.met and met.value == 1.0
    assert not missed.met and missed.value is None
