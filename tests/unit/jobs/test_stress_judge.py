"""The stress stage's judgement on constructed half hours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.errors import HarnessError
from harness.inventory import Board
from harness.jobs import golden, pace, references, stress, turns
from harness.jobs.base import StageContext
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]
START_NS = 5_000_000_000  # the log builder's own
MINUTES = 30


def told_golden(build: LogBuilder, context: StageContext, hashes: list[str], **more: Any) -> None:
    prompt = golden.golden_prompt(context.model)
    tokens = references.continuation(context.model, prompt, golden.COUNT)
    for number, digest in enumerate(hashes):
        build.data(
            "golden",
            {
                "when": "before" if number == 0 else "after", "attempt": 0, "at_s": 900.0 * number,
                "tokens": more.get("tokens", tokens), "hash": digest,
            },
        )  # fmt: skip


def half_hour(
    build: LogBuilder,
    rss_mb: Callable[[float], float] = lambda s: 200.0,
    speed: Callable[[float], float] = lambda s: 1.0,
    clock: float | None = None,
    restart: bool = True,
    own_mb: Callable[[float], float] | None = None,
) -> None:
    """Turns of eight tokens from the first second to the last, and a sample each second."""
    random = np.random.default_rng(1)
    seconds, now, number, cached = 60.0 * MINUTES, 1.0, 0, 0
    kill_at = 0.25 * seconds
    while now < seconds:
        attempt = int(now > kill_at)
        cached = 20 if cached > 200 else cached + 30
        head = {
            "conversation": number // 7, "turn": number % 7, "attempt": attempt,
            "prompt_tokens": 20, "started_s": now,
        }  # fmt: skip
        build.data("turn-start", head, now)
        gaps = (100 + 0.2 * cached) / speed(now) * (1 + 0.03 * random.normal(size=8))
        at_us = np.cumsum(gaps * 1000).astype(int)
        build.data(
            "turn",
            {
                **head, "finish": "cancelled" if number % 3 == 1 else "length",
                "planned_cancel": number % 3 == 1, "new_tokens": 8, "cached_tokens": cached,
                "full": cached > 200, "ttft_s": 0.3, "tpot_s": float(gaps.mean()) / 1e3,
                "start_ns": START_NS + int(now * 1e9), "token_us": at_us.tolist(),
            },
            now,
        )  # fmt: skip
        now += at_us[-1] / 1e6 + 0.4
        number += 1
    for second in range(int(seconds)):
        extra: dict[str, Any] = {} if clock is None else {"clocks_mhz": [clock]}
        if own_mb is not None:
            extra |= {"anonymous_mb": own_mb(second) - 1, "swap_mb": 1.0}
        build.add(
            "sample", float(second), attempt=int(second > kill_at), rss_mb=rss_mb(second),
            cpu_percent=98.0, **extra,
        )  # fmt: skip
    if restart:
        build.add("engine-exit", kill_at, attempt=0, planned=True, signal="SIGKILL")


def judged(build: LogBuilder, context: StageContext) -> Verdict:
    return stress.STAGE.judge(context, build.ended())


def check(verdict: Verdict, name: str) -> Any:
    return next(check for check in verdict.checks if check.name == name)


@pytest.fixture
def context(stage_context: Contexts) -> StageContext:
    return stage_context(stress_minutes=float(MINUTES))


def test_steady_half_hour_passes(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a", "a"])
    half_hour(build)
    verdict = judged(build, context)
    assert verdict.outcome == Outcome.PASS, [c for c in verdict.checks if c.outcome != "pass"]
    details = verdict.details
    assert (details["leak"], details["restarts"]) == ("none", 1)
    assert details["sustained_ratio"] == pytest.approx(1.0, abs=0.03)
    assert 100 < details["itl_p50_ms"] < 140
    assert details["cancelled"] > 100
    assert len(details["samples"]) <= 2000
    busy = [sample["tokens_per_s"] for sample in details["samples"]][10:]
    assert np.mean(busy) == pytest.approx(details["tokens"] / (60 * MINUTES), rel=0.1)


def test_memory_that_grows_to_the_end_is_a_leak(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, rss_mb=lambda s: 200 + 0.02 * s)
    verdict = judged(build, context)
    assert verdict.outcome == Outcome.FAIL
    assert check(verdict, "leak").outcome == Outcome.FAIL
    assert verdict.details["leak_growth_mb"] > 5
    assert "leak" in verdict.headline.lower()
    assert verdict.remedy


def test_weights_that_come_into_memory_are_no_leak(
    build: LogBuilder, context: StageContext
) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, rss_mb=lambda s: 200 + 0.02 * s, own_mb=lambda s: 60.0)
    assert judged(build, context).details["leak"] == "none"


def test_leak_shows_even_when_resident_memory_stays_level(
    build: LogBuilder, context: StageContext
) -> None:
    """The kernel drops mapped weights, or swaps, as the heap grows."""
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, own_mb=lambda s: 60 + 0.02 * s)
    verdict = judged(build, context)
    assert check(verdict, "leak").outcome == Outcome.FAIL
    assert verdict.details["samples"][-1]["own_mb"] == pytest.approx(60 + 0.02 * 1799)


def test_memory_without_a_reading_is_not_judged(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, rss_mb=lambda s: 0.0)
    for event in build.events:
        if event.kind == "sample":
            del event.data["rss_mb"]  # type: ignore[attr-defined]
    verdict = judged(build, context)
    assert check(verdict, "memory_mb").outcome == Outcome.INVALID
    assert verdict.outcome == Outcome.INVALID


def test_one_golden_generation_is_no_comparison(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a"])
    half_hour(build)
    verdict = judged(build, context)
    assert check(verdict, "golden_same").outcome == Outcome.INVALID
    assert verdict.details["golden_after"] == ""


@pytest.mark.parametrize(("ready", "outcome"), [(True, Outcome.INVALID), (False, Outcome.FAIL)])
def test_engine_that_came_back_but_had_no_time_to_answer_is_no_failure(
    ready: bool, outcome: Outcome, build: LogBuilder, context: StageContext
) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build)
    build.events = [
        event
        for event in build.events
        if event.kind != "data" or event.data["value"].get("attempt", 0) == 0
    ]
    if ready:
        build.add("ready", 1790.0, attempt=1)
    verdict = judged(build, context)
    assert check(verdict, "restart").outcome == outcome
    assert ("--stress-minutes" in check(verdict, "restart").sentence) == ready
    assert verdict.remedy is not None and ("--stress-minutes" in verdict.remedy) == ready


def test_allocator_that_settles_is_no_leak(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, rss_mb=lambda s: 220 - 20 * float(np.exp(-s / 120)))
    assert judged(build, context).details["leak"] == "none"


def test_speed_that_sags_is_drift_on_a_board_and_a_warning_on_a_virtual_one(
    build: LogBuilder, context: StageContext
) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, speed=lambda s: 1.0 if s < 900 else 0.85)
    log = build.ended()
    verdict = stress.STAGE.judge(context, log)
    assert check(verdict, "sustained_ratio").outcome == Outcome.FAIL
    assert verdict.details["sustained_ratio"] == pytest.approx(0.85, abs=0.03)
    virtual = dataclasses.replace(context, board=Board(name="v", virtual={}))
    assert stress.STAGE.judge(virtual, log).outcome == Outcome.WARN


def test_longer_dialogues_are_no_drift(build: LogBuilder, context: StageContext) -> None:
    """Early dialogues are short, late ones long: tokens slow down, the board does not."""
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build)
    # Only turns with a short cache in the first half, only those with a long one in the second.
    build.events = [
        event
        for event in build.events
        if event.data.get("name") not in ("turn", "turn-start")
        or (event.data["value"]["started_s"] < 900)
        == (event.data["value"].get("cached_tokens", 0) < 110)
    ]
    build.events = [e for e in build.events if e.data.get("name") != "turn-start"]
    verdict = judged(build, context)
    assert check(verdict, "sustained_ratio").outcome == Outcome.PASS


def test_changed_answers_fail_and_say_when(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a", "b"])
    half_hour(build)
    verdict = judged(build, context)
    assert check(verdict, "golden_same").outcome == Outcome.FAIL
    assert "1800 s" in verdict.headline
    assert (verdict.details["golden_before"], verdict.details["golden_after"]) == ("a", "b")


def test_kill_that_did_not_happen_fails(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, restart=False)
    assert check(judged(build, context), "restart").outcome == Outcome.FAIL


def test_turn_under_way_when_the_engine_was_killed_is_kept(
    build: LogBuilder, context: StageContext
) -> None:
    build.started()
    head = {"conversation": 0, "attempt": 0, "prompt_tokens": 9, "started_s": 3.0}
    build.data("turn-start", {**head, "turn": 0})
    build.data("turn-start", {**head, "turn": 0, "attempt": 1})
    build.data(
        "turn",
        {**head, "turn": 0, "attempt": 1, "finish": "stop", "new_tokens": 4, "cached_tokens": 12},
    )
    seen, ended = turns.read_turns(build.log("finished"))
    assert [(turn.finish, turn.attempt, turn.conversation) for turn in seen] == [
        ("killed", 0, 0), ("stop", 1, 1),
    ]  # fmt: skip
    assert len(ended) == 1


def test_deadline_leaves_a_slow_board_time_for_its_golden_generations(
    stage_context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = stress.STAGE.plan(stage_context(stress_minutes=1.0)).spec.deadline_s
    monkeypatch.setattr(pace, "SLOWEST_BYTES_PER_S", pace.SLOWEST_BYTES_PER_S / 1000)
    assert stress.STAGE.plan(stage_context(stress_minutes=1.0)).spec.deadline_s > short + 100


def test_low_clocks_are_counted_in_seconds(build: LogBuilder, context: StageContext) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, clock=1800.0)
    late = [event for event in build.events if event.kind == "sample"][-100:]
    for event in late:
        event.data["clocks_mhz"][0] = 1200.0  # type: ignore[index]
    verdict = judged(build, context)
    assert verdict.details["throttled_s"] == pytest.approx(100, abs=1)
    assert check(verdict, "throttled").outcome == Outcome.WARN


def test_one_minute_is_too_short_for_a_leak_verdict(
    build: LogBuilder, context: StageContext
) -> None:
    told_golden(build.started(), context, ["a", "a"])
    half_hour(build, rss_mb=lambda s: 200 + s)
    build.events = [event for event in build.events if event.t_ns < START_NS + 60e9]
    build.add("engine-exit", 15.0, attempt=0, planned=True, signal="SIGKILL")
    verdict = judged(build, context)
    assert verdict.details["leak"] == "too short to tell"
    assert check(verdict, "leak").outcome == Outcome.PASS


def test_plan_kills_the_engine_once_and_carries_the_dialogues(stage_context: Contexts) -> None:
    plan = stress.STAGE.plan(stage_context(stress_minutes=2.0))
    (restart,) = plan.spec.restarts
    assert 0 < restart.at_s < 120
    assert plan.spec.deadline_s > 120
    assert plan.inputs is not None
    with np.load(plan.inputs) as file:
        assert {f"dialogue.{n}.first" for n in range(stress.DIALOGUES)} <= set(file.files)
        assert len(file["dialogue.0.later.0"]) > 0


def test_minutes_come_from_the_board_unless_an_option_says_otherwise(
    stage_context: Contexts,
) -> None:
    board = {"stress_minutes": 12.0}
    assert stress.STAGE.plan(stage_context(board=board)).spec.parameters["minutes"] == 12.0
    plan = stress.STAGE.plan(stage_context(board=board, stress_minutes=3.0))
    assert plan.spec.parameters["minutes"] == 3.0


def test_context_beyond_the_model_is_refused(stage_context: Contexts) -> None:
    with pytest.raises(HarnessError, match="stress context"):
        stress.STAGE.plan(stage_context(stress_context=100_000))
