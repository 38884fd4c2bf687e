"""The thread ladder on the host: its plan, its verdict, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from harness.jobs import golden, references
from harness.jobs.base import StageContext
from harness.jobs.engines import Tuned
from harness.jobs.ladder import LADDER, tuned_of
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]
PACKED = {"unit": "packed"}


def rung(threads: int, speeds: list[float], **more: Any) -> dict[str, Any]:
    return {
        "question": "threads",
        "threads": threads,
        "cpus": None,
        "kv_layout": "sd",
        "huge_pages": False,
        "medians_ns": [1e9 / speed for speed in speeds],
        "tokens_per_s": sorted(speeds)[len(speeds) // 2],
        **more,
    }


def told(
    build: LogBuilder, context: StageContext, rungs: list[dict[str, Any]], chosen: int, **text: Any
) -> Any:
    prompt = golden.golden_prompt(context.model)
    tokens = references.continuation(context.model, prompt, golden.COUNT)
    build.started(cpus=[0, 1, 2, 3])
    for index in range(len(rungs)):
        changed = text.get("other") == index
        written = [*tokens[:-1], tokens[-1] + 1] if changed else tokens
        build.data(
            "golden",
            {"when": f"rung {index}", "attempt": 0, "at_s": 1.0, "tokens": written,
             "hash": f"h{changed}", "tokens_per_s": 1.0},
        )  # fmt: skip
    build.data("rungs", rungs).data("choice", rungs[chosen])
    return build.ended()


def test_the_choice_is_kept_with_the_cores_and_told_with_every_rung(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(board={"virtual": {}, "host": "127.0.0.1"}, engine=PACKED)
    rungs = [rung(1, [5, 5.1, 4.9]), rung(2, [9, 9.2, 8.8], cpus=[2, 3]), rung(4, [7, 7, 7])]
    verdict = LADDER.judge(context, told(build, context, rungs, 1))
    assert verdict.outcome == Outcome.PASS
    assert verdict.headline == "2 threads on cores 2-3, sd: 9.0 tokens/s, up to 1.80 × 1 thread"
    assert tuned_of(verdict) == Tuned(threads=2, cpus=(2, 3))
    ladder = next(check for check in verdict.checks if check.name == "ladder")
    assert "4 threads, sd 7.0 (7.0 to 7.0)" in ladder.sentence


def test_layout_and_huge_pages_are_kept_only_where_they_were_compared(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(board={"virtual": {}, "host": "127.0.0.1"}, engine=PACKED)
    rungs = [rung(1, [5.0]), rung(1, [6.0], question="kv_layout", kv_layout="ds")]
    found = tuned_of(LADDER.judge(context, told(build, context, rungs, 1)))
    assert found == Tuned(threads=1, cpus=None, kv_layout="ds", huge_pages=None)


def test_a_text_that_depends_on_threads_fails_and_nothing_is_kept(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(board={"virtual": {}, "host": "127.0.0.1"}, engine=PACKED)
    log = told(build, context, [rung(1, [5.0]), rung(2, [9.0])], 1, other=1)
    verdict = LADDER.judge(context, log)
    assert verdict.outcome == Outcome.FAIL
    assert "rung 1 wrote another than rung 0" in verdict.headline
    assert tuned_of(verdict) is None


def test_a_wrong_text_fails_whatever_its_speed(build: LogBuilder, stage_context: Contexts) -> None:
    context = stage_context(board={"virtual": {}, "host": "127.0.0.1"}, engine=PACKED)
    verdict = LADDER.judge(context, told(build, context, [rung(1, [5.0])], 0, other=0))
    assert verdict.outcome == Outcome.FAIL
    assert verdict.checks[0].name == "golden_right"


def test_a_crash_is_told_and_nothing_is_kept(build: LogBuilder, stage_context: Contexts) -> None:
    context = stage_context()
    verdict = LADDER.judge(context, build.started().ended("failed", code=None, signal=4))
    assert verdict.outcome == Outcome.FAIL
    assert "SIGILL" in verdict.headline
    assert tuned_of(verdict) is None


@pytest.mark.parametrize(
    ("board", "wanted"),
    [
        ({}, {}),
        ({"threads": 3}, {"threads": 3}),
        ({"pin": "big"}, {"cpus": [2, 3]}),
        ({"pin": [1, 0]}, {"cpus": [1, 0]}),
        ({"pin": "none"}, {}),
    ],
)
def test_what_the_file_says_is_not_tried(
    stage_context: Contexts, board: dict[str, Any], wanted: dict[str, Any]
) -> None:
    plan = LADDER.plan(stage_context(board=board))
    given = plan.spec.parameters
    assert {name: given[name] for name in ("threads", "cpus") if name in given} == wanted
    assert plan.spec.pin is None  # the job goes over the cores itself
    assert "layouts" not in given  # numpy has one
