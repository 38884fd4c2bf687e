"""The curve stage's judgement on constructed measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.errors import HarnessError
from harness.inventory import Board
from harness.jobs import curve, depth, golden, pace, prompts, references
from harness.jobs.base import StageContext
from harness.jobs.details import CurveFit
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]
Shape = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], np.ndarray[Any, Any]]

LENGTHS = np.linspace(16, 1000, 24).astype(int)
TOKENS = 4
BASE_MS, SLOPE_MS = 40.0, 0.01
DEPTHS = [32, 64, 128, 256]
TOP = 8


def affine(length: np.ndarray[Any, Any], t_s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    del t_s
    return BASE_MS + SLOPE_MS * length


def measured(build: LogBuilder, context: StageContext, shape: Shape = affine, **more: Any) -> None:
    """Three shuffled sweeps of `shape(length, time)` milliseconds with 1 % noise."""
    random = np.random.default_rng(3)
    columns: dict[str, list[int]] = {
        name: [] for name in ("sweep", "order", "length", "position", "start_ns", "duration_ns")
    }
    now_s = 10.0
    for sweep in range(3):
        for order, length in enumerate(random.permutation(LENGTHS)):
            for token in range(TOKENS):
                ms = float(shape(np.array(length), np.array(now_s)))
                ms *= 1 + 0.01 * random.normal()
                row = (sweep, order, length, length + token, int((5 + now_s) * 1e9), int(ms * 1e6))
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(int(value))
                now_s += ms / 1e3
    build.started(bare_rss_mb=30.0, cpus=[0], **more.get("ready", {}))
    tokens = more.get("golden") or golden_tokens(context)
    for when, at_s in more.get("goldens", (("before", 1.0), ("after", 60.0))):
        told = {"when": when, "attempt": 0, "at_s": at_s, "tokens": tokens, "hash": "h"}
        build.data("golden", told)
    build.data("bandwidth", {"gb_s": 5.0, "bytes": 1 << 26, "what": "linear read"})
    ttft = {"prompt_tokens": 128, "ttft_s": 0.9, "first_s": 1.0, "tokens_per_s": 142.0}
    build.data("ttft", {**ttft, **more.get("ttft", {})})
    asked = more.get("asked", 1024)
    build.data("context", {"asked": asked, "reached": more.get("reached", asked)})
    prefill = {"tokens": 1024, "seconds": [0.9] * 8, "chunks": [128] * 8, "tokens_per_s": 146}
    build.data("prefill", {**prefill, **more.get("prefill", {})})
    build.data(
        "schedule",
        {
            "lengths": LENGTHS.tolist(), "tokens_per_point": TOKENS, "sweeps": 3,
            "weight_bytes": 100_000_000, "kv_bytes_per_position": 46_080,
        },
    )  # fmt: skip
    build.data("memory", {"peak_rss_mb": more.get("peak_mb", 210.0)})
    build.arrays("depth", **{**right_at_depth(context), **more.get("depth", {})})
    build.arrays("tokens", **{name: np.array(value) for name, value in columns.items()})
    for second in range(60):
        clock = more.get("clock", lambda _: None)(second)
        extra = {} if clock is None else {"clocks_mhz": [clock, 600.0]}
        heat = {"temperatures": {"cpu": 50 + second / 2}}
        build.add("sample", float(second), rss_mb=200.0, cpu_percent=99.0, **heat, **extra)


def right_at_depth(context: StageContext) -> dict[str, Any]:
    """What a sound board tells: the reference's own logits."""
    tokens = prompts.text_tokens(context.model, 1024, context.options.seed)
    logits = depth.reference_logits(context.model, references.PLAIN, tokens, DEPTHS)
    ids = np.argsort(-logits, axis=-1)[:, :TOP]
    return {
        "positions": np.array(DEPTHS), "best": ids[:, 0], "ids": ids,
        "values": np.take_along_axis(logits, ids, axis=-1),
    }  # fmt: skip


def golden_tokens(context: StageContext) -> list[int]:
    prompt = golden.golden_prompt(context.model)
    return references.continuation(context.model, prompt, golden.COUNT)


def verdict_of(
    build: LogBuilder, context: StageContext, shape: Shape = affine, **more: Any
) -> Verdict:
    measured(build, context, shape, **more)
    return curve.STAGE.judge(context, build.ended())


def outcome_of(verdict: Verdict, name: str) -> Outcome:
    return next(check.outcome for check in verdict.checks if check.name == name)


def test_straight_curve_passes_and_explains_itself(
    build: LogBuilder, stage_context: Contexts
) -> None:
    verdict = verdict_of(build, stage_context())
    assert verdict.outcome == Outcome.PASS, verdict
    details = verdict.details
    assert details["fit"]["model"] == "affine"
    assert details["tokens_per_s_start"] == pytest.approx(1000 / (BASE_MS + 0.16), rel=0.02)
    assert details["end_ratio"] == pytest.approx(40.16 / 50, rel=0.03)
    assert details["clocks"] == "unknown"
    # 100 MB at 5 GB/s are 20 ms, a token takes 40; 46 kB are 9.2 µs, a position costs 10.
    assert "20.0 ms" in details["physics"] and "2.0× its bytes" in details["physics"]
    assert "1.1× its bytes" in details["physics"]
    assert sum(details["memory_mb"].values()) == pytest.approx(210.0)


def test_step_at_one_length_is_the_engines_and_warns(
    build: LogBuilder, stage_context: Contexts
) -> None:
    def stepped(length: Any, t_s: Any) -> Any:
        return affine(length, t_s) * np.where(length > 520, 1.15, 1.0)

    verdict = verdict_of(build, stage_context(), stepped)
    assert outcome_of(verdict, "engine_steps") == Outcome.WARN
    (jump,) = verdict.details["fit"]["jumps"]
    assert jump["cause"] == "engine"
    assert 480 < jump["length"] < 580
    assert "%" in verdict.headline


def test_step_in_time_makes_a_real_board_invalid_and_a_virtual_one_not(
    build: LogBuilder, stage_context: Contexts
) -> None:
    def slowed(length: Any, t_s: Any) -> Any:
        return affine(length, t_s) * np.where(t_s > 16.0, 1.25, 1.0)

    context = stage_context()
    measured(build, context, slowed)
    log = build.ended()
    assert curve.STAGE.judge(context, log).outcome == Outcome.INVALID
    virtual = dataclasses.replace(context, board=Board(name="v", virtual={}))
    assert curve.STAGE.judge(virtual, log).outcome == Outcome.PASS


def test_falling_clocks_are_called_throttled_and_no_budget_is_judged(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(board={"budget": {"min_tokens_per_s": 1000.0}})
    verdict = verdict_of(build, context, clock=lambda s: 1800.0 if s < 30 else 1200.0)
    assert verdict.outcome == Outcome.INVALID
    assert "throttled: 1800 to 1200 MHz at up to 80 °C" in verdict.details["clocks"]
    assert outcome_of(verdict, "tokens_per_s_at_end") == Outcome.INVALID
    assert verdict.remedy


def test_steady_clocks_are_valid(build: LogBuilder, stage_context: Contexts) -> None:
    verdict = verdict_of(build, stage_context(), clock=lambda s: 1800.0 + s % 3)
    assert verdict.details["clocks"] == "valid"
    assert verdict.details["points"][0]["clock_mhz"] == pytest.approx(1800, abs=3)


@pytest.mark.parametrize(
    ("budget", "name"),
    [
        ({"min_tokens_per_s": 25.0}, "tokens_per_s_at_end"),
        ({"min_end_of_context_ratio": 0.9}, "end_of_context_ratio"),
        ({"max_ttft_s": 0.5}, "ttft_s"),
        ({"memory_mb": 200}, "memory_mb"),
    ],
)
def test_missed_budget_fails_alone(
    budget: dict[str, float], name: str, build: LogBuilder, stage_context: Contexts
) -> None:
    verdict = verdict_of(build, stage_context(board={"budget": budget}))
    failed = [check for check in verdict.checks if check.outcome == Outcome.FAIL]
    assert [check.name for check in failed] == [name]
    assert failed[0].limit == pytest.approx(next(iter(budget.values())))
    assert verdict.headline == failed[0].sentence
    assert verdict.remedy


def test_speed_at_the_start_does_not_excuse_the_end(
    build: LogBuilder, stage_context: Contexts
) -> None:
    """24.9 tokens/s at the start, 20 at the end: 22 are wanted, and the end counts."""
    verdict = verdict_of(build, stage_context(board={"budget": {"min_tokens_per_s": 22.0}}))
    assert outcome_of(verdict, "tokens_per_s_at_end") == Outcome.FAIL


def test_wrong_golden_text_fails_whatever_the_speed(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context()
    tokens = golden_tokens(context)
    tokens[4] = (tokens[4] + 1) % 256
    verdict = verdict_of(build, context, golden=tokens)
    assert outcome_of(verdict, "golden_right") == Outcome.FAIL
    assert "token 4" in verdict.headline


def check_of(verdict: Verdict, name: str) -> Any:
    return next(check for check in verdict.checks if check.name == name)


def test_context_that_was_not_reached_is_said(build: LogBuilder, stage_context: Contexts) -> None:
    verdict = verdict_of(build, stage_context(), reached=512)
    assert outcome_of(verdict, "context") == Outcome.WARN
    assert "512 of 1024" in verdict.headline
    assert "--curve-seconds" in check_of(verdict, "context").sentence


@pytest.mark.parametrize(
    ("budget", "name"),
    [
        # The points end at 1,000 positions with 50 ms; 2,048 take 60.5 ms, 16.5 tokens/s.
        ({"min_tokens_per_s": 18.0}, "tokens_per_s_at_end"),
        ({"min_end_of_context_ratio": 0.75}, "end_of_context_ratio"),
    ],
)
def test_budgets_are_judged_at_the_designed_context_even_if_it_was_not_reached(
    budget: dict[str, float], name: str, build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(board={"budget": budget})
    assert outcome_of(verdict_of(build, context, reached=1008, asked=1008), name) == Outcome.PASS
    build.events.clear()
    verdict = verdict_of(build, context, reached=1024, asked=2048)
    assert [c.name for c in verdict.checks if c.outcome == Outcome.FAIL] == [name]
    assert "2048" in check_of(verdict, name).sentence


def test_budget_that_is_missed_far_behind_the_last_point_only_is_left_open(
    build: LogBuilder, stage_context: Contexts
) -> None:
    """20 tokens/s at 1,000 positions, some 8 at 8,192 by the fit."""
    for limit, outcome in ((12.0, Outcome.INVALID), (22.0, Outcome.FAIL), (5.0, Outcome.PASS)):
        build.events.clear()
        context = stage_context(board={"budget": {"min_tokens_per_s": limit}})
        verdict = verdict_of(build, context, reached=1024, asked=8192)
        assert outcome_of(verdict, "tokens_per_s_at_end") == outcome
        if outcome == Outcome.INVALID:
            assert verdict.remedy is not None and "--curve-seconds" in verdict.remedy
    assert "8192" in check_of(verdict, "tokens_per_s_at_end").sentence


def test_extrapolation_follows_the_last_stretch_and_never_falls() -> None:
    def fit(*fitted: tuple[int, float]) -> CurveFit:
        return CurveFit(
            model="kink", delta_bic=20.0, intercept_ms=40.0, slope_us_per_position=0.0,
            fitted=fitted, jumps=(),
        )  # fmt: skip

    assert curve.extrapolated_ms(fit((16, 40.0), (500, 40.0), (600, 42.0)), 1100) == 52.0
    assert curve.extrapolated_ms(fit((16, 41.0), (600, 40.0)), 1100) == 40.0


def test_step_in_time_keeps_budgets_from_being_judged_on_a_real_board(
    build: LogBuilder, stage_context: Contexts
) -> None:
    def slowed(length: Any, t_s: Any) -> Any:
        return affine(length, t_s) * np.where(t_s > 16.0, 1.25, 1.0)

    context = stage_context(board={"budget": {"min_tokens_per_s": 1000.0}})
    verdict = verdict_of(build, context, slowed, clock=lambda _: 1800.0)
    assert verdict.outcome == Outcome.INVALID
    check = check_of(verdict, "tokens_per_s_at_end")
    assert (check.outcome, check.limit) == (Outcome.INVALID, 1000.0)
    assert "changed with time" in check.sentence
    assert verdict.remedy is not None and "stop what else runs" in verdict.remedy


def test_fault_behind_the_first_depth_is_found_and_placed(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context()
    values = right_at_depth(context)["values"].copy()
    values[2:, 3] += 0.05
    verdict = verdict_of(build, context, depth={"values": values})
    assert outcome_of(verdict, "right_at_depth") == Outcome.FAIL
    assert "With 128 positions" in verdict.headline and "with 64 they are right" in verdict.headline
    assert verdict.remedy


def test_another_order_of_sums_is_no_fault_at_depth(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context()
    values = right_at_depth(context)["values"]
    noise = np.random.default_rng(0).normal(0, 1e-4, values.shape).astype(np.float32)
    verdict = verdict_of(build, context, depth={"values": values + noise})
    assert outcome_of(verdict, "right_at_depth") == Outcome.PASS


def test_choice_that_the_reference_would_not_make_fails_at_depth(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context()
    right = right_at_depth(context)
    best = right["best"].copy()
    best[-1] = right["ids"][-1, -1]
    verdict = verdict_of(build, context, depth={"best": best})
    assert outcome_of(verdict, "right_at_depth") == Outcome.FAIL
    assert "below its own" in verdict.headline


@pytest.mark.parametrize(
    "told",
    [
        {"best": np.array([0, 0, 0, 256])},
        {"best": np.array([0, 0, 0, -1])},
        {"positions": np.array([0, 64, 128, 256])},
        {"positions": np.array([64, 32, 128, 256])},
        {"positions": np.array([32, 64, 128, 100_000])},
        {"ids": np.zeros((4, 3), np.int64)},
        {"values": np.full((4, TOP), np.nan)},
    ],
)
def test_nonsense_of_a_board_about_its_logits_fails(
    told: dict[str, Any], build: LogBuilder, stage_context: Contexts
) -> None:
    verdict = verdict_of(build, stage_context(), depth=told)
    assert outcome_of(verdict, "right_at_depth") == Outcome.FAIL


def test_one_golden_generation_proves_nothing(build: LogBuilder, stage_context: Contexts) -> None:
    for goldens in ([("before", 1.0)], [("before", 1.0), ("between", 2.0)]):
        build.events.clear()
        verdict = verdict_of(build, stage_context(), goldens=goldens)
        assert outcome_of(verdict, "golden_same") == Outcome.INVALID


def test_unknown_memory_is_not_judged(build: LogBuilder, stage_context: Contexts) -> None:
    context = stage_context(board={"budget": {"memory_mb": 100}})
    assert outcome_of(verdict_of(build, context, peak_mb=0.0), "memory_mb") == Outcome.INVALID


def test_first_token_of_a_slow_board_counts_for_the_designed_prompt(
    build: LogBuilder, stage_context: Contexts
) -> None:
    """It timed 16 tokens in 4 s; the first 128 tokens of its prefill took 20."""
    context = stage_context(board={"budget": {"max_ttft_s": 10.0}})
    ttft = {"prompt_tokens": 16, "ttft_s": 4.0}
    prefill = {"seconds": [20.0, 20.0], "chunks": [128, 128]}
    verdict = verdict_of(build, context, ttft=ttft, prefill=prefill)
    assert check_of(verdict, "ttft_s").measured == 20.0
    assert outcome_of(verdict, "ttft_s") == Outcome.FAIL
    build.events.clear()
    prefill = {"seconds": [9.0], "chunks": [64]}
    verdict = verdict_of(build, context, ttft=ttft, prefill=prefill)
    assert check_of(verdict, "ttft_s").measured == pytest.approx(32.0)


def test_deadline_grows_with_the_package_and_the_time_asked_for(
    stage_context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = curve.STAGE.plan(stage_context()).spec.deadline_s
    patient = curve.STAGE.plan(stage_context(curve_seconds=600.0)).spec.deadline_s
    assert patient >= plain + 540
    monkeypatch.setattr(pace, "SLOWEST_BYTES_PER_S", pace.SLOWEST_BYTES_PER_S / 1000)
    assert curve.STAGE.plan(stage_context()).spec.deadline_s > plain + 100


def test_plan_asks_for_the_designed_context(stage_context: Contexts) -> None:
    plan = curve.STAGE.plan(stage_context(context=128, curve_lengths=(20, 40)))
    assert plan.spec.parameters["context"] == 128
    assert plan.spec.parameters["lengths"] == [20, 40]
    assert plan.inputs is not None
    with np.load(plan.inputs) as file:
        assert file["tokens"].shape == (128,)


@pytest.mark.parametrize("options", [{"context": 100_000}, {"context": 64, "curve_lengths": (64,)}])
def test_plan_refuses_what_the_model_cannot_do(
    options: dict[str, Any], stage_context: Contexts
) -> None:
    with pytest.raises(HarnessError):
        curve.STAGE.plan(stage_context(**options))
