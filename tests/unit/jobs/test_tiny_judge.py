"""The tiny stage's judgement on logs built from what the reference really generates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from harness.jobs import tiny
from harness.jobs.base import StageContext
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]
CLEAN: dict[str, Any] = {"rss_mb": [60.0 + 0.001 * n for n in range(24)], "changed": None}


@pytest.fixture
def context(stage_context: Contexts) -> StageContext:
    return stage_context(seed=3)


@pytest.fixture
def outcomes(context: StageContext) -> list[dict[str, Any]]:
    size = tiny.tiny_context(context)
    found = tiny.reference_cases(context, tiny.cases(context, size), size)
    return [{**case, "tpot_s": 0.001} for case in copy.deepcopy(found)]


def verdict_of(
    context: StageContext,
    build: LogBuilder,
    outcomes: list[dict[str, Any]],
    rounds: dict[str, Any] = CLEAN,
    **other: Any,
) -> Verdict:
    build.started()
    for case in outcomes:
        build.data("case", case)
    build.data("rounds", rounds)
    first = outcomes[0]["turns"][0]["tokens"]
    build.data(
        "cancelled",
        {
            "finish": "cancelled",
            "tokens": first[:3],
            "afterwards": first,
            **other.get("cancel", {}),
        },
    )
    build.data("refused", {"refused": True, "message": "too long", "cached": 0})
    return tiny.STAGE.judge(context, build.ended())


def test_the_reference_itself_passes(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    verdict = verdict_of(context, build, outcomes)
    assert verdict.outcome == Outcome.PASS, verdict
    assert verdict.details["tokens_compared"] > 100
    assert verdict.details["first_mismatch"] is None


def test_wrong_token_is_placed(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    tokens = outcomes[1]["turns"][0]["tokens"]
    right, tokens[5] = tokens[5], (tokens[5] + 1) % 256
    verdict = verdict_of(context, build, outcomes)
    assert verdict.outcome == Outcome.FAIL
    expected = f"prompt 2 (one token), token 5: board {tokens[5]}, reference {right}"
    assert verdict.details["first_mismatch"] == expected
    assert expected in verdict.headline
    assert verdict.remedy


@pytest.mark.parametrize("change", ["shorter", "finish", "missing"])
def test_incomplete_answers_do_not_pass(
    change: str, context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    if change == "shorter":
        outcomes[2]["turns"][0]["tokens"].pop()
    elif change == "finish":
        outcomes[2]["turns"][0]["finish"] = "stop"
    else:
        del outcomes[2]
    assert verdict_of(context, build, outcomes).outcome == Outcome.FAIL


def test_generation_that_does_not_stop_at_the_context_fails(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    outcomes[-1]["turns"][0]["finish"] = "stop"
    verdict = verdict_of(context, build, outcomes)
    bad = {check.name for check in verdict.checks if check.outcome == Outcome.FAIL}
    assert "stops_at_context" in bad


def test_memory_that_grows_each_round_fails(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    growing = {"rss_mb": [60 + 0.2 * n for n in range(24)], "changed": None}
    verdict = verdict_of(context, build, outcomes, growing)
    assert verdict.outcome == Outcome.FAIL
    assert "grew" in verdict.headline


def test_first_growth_of_the_allocator_is_no_leak(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    settled = {"rss_mb": [50.0, 52.0, 54.0, 56.0] + [60.0] * 20, "changed": None}
    assert verdict_of(context, build, outcomes, settled).outcome == Outcome.PASS


def test_other_tokens_in_a_later_round_fail(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    rounds = {**CLEAN, "changed": "case 'greedy' gave other tokens in round 9"}
    verdict = verdict_of(context, build, outcomes, rounds)
    assert verdict.outcome == Outcome.FAIL
    assert "round 9" in verdict.headline


def test_cancelled_generation_that_disturbs_the_next_fails(
    context: StageContext, build: LogBuilder, outcomes: list[dict[str, Any]]
) -> None:
    verdict = verdict_of(context, build, outcomes, cancel={"afterwards": [1, 2, 3, 4]})
    assert "cancels" in {c.name for c in verdict.checks if c.outcome == Outcome.FAIL}
