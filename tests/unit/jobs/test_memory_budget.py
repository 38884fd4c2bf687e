"""A model that does not fit its board is refused before anything is sent there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.boards.facts import Facts
from harness.errors import BoardError
from harness.farm.results import StageResult
from harness.jobs import stages
from harness.jobs.base import StageContext, stage_refusal
from harness.jobs.memory import limits_of, need_of, refusal
from harness.verdicts import Outcome

Contexts = Callable[..., StageContext]
CURVE = next(stage for stage in stages() if stage.name == "curve")


def facts(**values: Any) -> Facts:
    return Facts(machine="aarch64", kernel="Linux", **values)


def test_every_stage_says_how_far_its_cache_goes(stage_context: Contexts) -> None:
    context = stage_context(context=128, stress_context=96)
    extents = {stage.name: stage.extent(context) for stage in stages()}
    assert extents["curve"].positions == 128
    assert extents["stress"].positions == 96
    assert extents["accuracy"].logits == 96  # as many positions as are compared
    assert all(extent.positions <= context.model.hyperparameters.context
               for extent in extents.values())  # fmt: skip


def test_a_model_above_the_budget_fails_with_the_table(stage_context: Contexts) -> None:
    context = stage_context(board={"budget": {"memory_mb": 20}}, context=128)
    verdict = stage_refusal(CURVE, context)
    assert verdict is not None
    (check,) = verdict.checks
    assert (verdict.outcome, check.name, check.limit) == (Outcome.FAIL, "memory_budget", 20)
    assert isinstance(check.measured, float) and check.measured > 20
    assert "KV cache, 128 positions, f32" in check.sentence
    assert "refused before loading" in verdict.headline
    lines = StageResult("b", "curve", verdict, "r").explain()
    assert any("weights, mapped" in line and line.endswith("MiB") for line in lines)


def test_a_board_with_room_refuses_nothing(stage_context: Contexts) -> None:
    assert stage_refusal(CURVE, stage_context(board={"budget": {"memory_mb": 900}})) is None
    assert stage_refusal(CURVE, stage_context()) is None  # nothing is known of its memory


def test_a_board_too_small_fails_and_a_board_in_use_is_its_trouble(
    stage_context: Contexts,
) -> None:
    context = stage_context(context=128)
    wanted = need_of(context.model, context.engine.options, CURVE.extent(context))
    small = refusal(context.board, facts(memory_mb=80, available_mb=70), wanted)
    assert small is not None
    assert small.outcome == Outcome.FAIL
    assert "the board has, less what its system keeps, 32" in small.headline
    with pytest.raises(BoardError) as caught:
        refusal(context.board, facts(memory_mb=900, available_mb=20), wanted)
    assert caught.value.kind == "low-memory"
    assert "20 MiB are available now" in str(caught.value)
    assert "weights, mapped" in str(caught.value)


def test_a_limit_of_a_process_concerns_its_own_memory_alone(stage_context: Contexts) -> None:
    context = stage_context()
    limits = limits_of(facts(memory_mb=30, memory_limit="ulimit -d"), context.board.budget)
    assert (limits.data, limits.memory, limits.available) == (30, None, None)
    group = limits_of(facts(memory_mb=512, memory_limit="cgroup"), context.board.budget)
    assert (group.memory, group.reserve) == (512, 0)
