"""The accuracy stage's judgement, on what the reference itself would have sent, changed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.measure.alignment import shifted
from harness.jobs import accuracy, agreement, references
from harness.jobs.base import StageContext
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def context(stage_context: Contexts) -> StageContext:
    return stage_context(accuracy_positions=32, accuracy_tokens=24)


def judged(
    build: LogBuilder,
    context: StageContext,
    change: Change = lambda sent: None,
) -> Verdict:
    """Judge a log in which the board sent the naive implementation's numbers, after `change`."""
    tokens, rows, question = accuracy.subject(context)
    aligned = references.aligned(context.model, tokens, rows)
    text = references.continuation(context.model, question, 24)
    sent: dict[str, Any] = {
        "repeat": {"hashes": ["aa"] * 5, "steps": 3, "prefill": 8},
        "taps": {"with": "cc", "without": "cc"},
        "free_told": {"positions": len(tokens), "stopped": None},
        "free": dict(aligned.free),
        "local": dict(aligned.local),
        "disturbed": [],
        "logits": aligned.logits.copy(),
        "text": {"tokens": text, "finish": "length", "stopped": None},
    }
    change(sent)
    build.started()
    build.data("repeat", sent["repeat"]).data("taps", sent["taps"])
    build.data("free", sent["free_told"]).data("local", {"disturbed": sent["disturbed"]})
    build.data("text", sent["text"])
    if sent["free"]:
        build.arrays("free", **sent["free"])
    build.arrays("local", **sent["local"])
    build.arrays("logits", shifted=shifted(sent["logits"]))
    return accuracy.STAGE.judge(context, build.ended())


def failed(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if check.outcome == Outcome.FAIL}


def test_naive_implementation_passes(build: LogBuilder, context: StageContext) -> None:
    verdict = judged(build, context)
    assert verdict.outcome == Outcome.PASS, verdict.checks
    assert verdict.details["logits"]["top1"] == 1.0
    assert verdict.details["logits"]["mean_kl"] < 1e-4
    assert verdict.details["text"]["first_divergence"] is None
    modes = [row["mode"] for row in verdict.details["ops"]]
    assert modes.count("local") == modes.count("free")


def test_scaled_op_is_named(build: LogBuilder, context: StageContext) -> None:
    def change(sent: dict[str, Any]) -> None:
        sent["local"]["L01.ffn.down"] = sent["local"]["L01.ffn.down"] * np.float32(1.02)

    verdict = judged(build, context, change)
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, "L01.ffn.down")
    assert "first op that goes wrong" in verdict.headline


def test_the_earliest_of_two_wrong_ops_is_named(build: LogBuilder, context: StageContext) -> None:
    def change(sent: dict[str, Any]) -> None:
        for name in ("L01.ffn.up", "L00.attn.out"):
            sent["local"][name] = sent["local"][name] * np.float32(1.5)

    assert judged(build, context, change).culprit == "L00.attn.out"


def test_drift_alone_blames_nobody(build: LogBuilder, context: StageContext) -> None:
    def change(sent: dict[str, Any]) -> None:
        sent["free"] = {name: value * np.float32(1.5) for name, value in sent["free"].items()}

    verdict = judged(build, context, change)
    assert verdict.culprit is None
    assert "ops_local" not in failed(verdict)


def test_results_that_do_not_repeat_fail_and_name_no_op(
    build: LogBuilder, context: StageContext
) -> None:
    def change(sent: dict[str, Any]) -> None:
        sent["repeat"]["hashes"][3] = "bb"
        sent["local"]["L01.ffn.up"] = sent["local"]["L01.ffn.up"] * np.float32(1.5)

    verdict = judged(build, context, change)
    assert "repeatable" in failed(verdict)
    assert verdict.culprit is None  # a race: whichever op shows it is chance
    assert verdict.remedy is not None and "race" in verdict.remedy


def test_taps_that_change_the_result_name_no_op(build: LogBuilder, context: StageContext) -> None:
    def change(sent: dict[str, Any]) -> None:
        sent["taps"]["with"] = "dd"

    verdict = judged(build, context, change)
    assert failed(verdict) == {"taps_harmless"}
    assert verdict.culprit is None


def test_bad_numbers_stop_the_free_run_and_are_named(
    build: LogBuilder, context: StageContext
) -> None:
    stopped = {"step": 0, "op": "L01.attn.out", "layer": 1, "message": "1 of 64 values are NaN"}

    def change(sent: dict[str, Any]) -> None:
        sent["free_told"] = {"positions": 0, "stopped": stopped}
        sent["free"] = {}
        sent["logits"] = sent["logits"][:0]
        sent["text"] = {"tokens": [], "finish": "not finite", "stopped": stopped}

    verdict = judged(build, context, change)
    assert verdict.culprit == "L01.attn.out"  # alone, the op is right: its inputs must overflow it
    assert {"finite", "mean_kl", "text"} <= failed(verdict)
    assert verdict.details["logits"]["positions"] == 0


def test_divergent_logits_miss_the_budget(build: LogBuilder, context: StageContext) -> None:
    def change(sent: dict[str, Any]) -> None:
        noise = np.random.default_rng(0).normal(size=sent["logits"].shape)
        sent["logits"] = sent["logits"] + noise.astype(np.float32)

    verdict = judged(build, context, change)
    assert failed(verdict) == {"mean_kl"}
    assert verdict.details["logits"]["mean_kl_low"] <= verdict.details["logits"]["mean_kl"]
    assert sum(count for _, count in verdict.details["logits"]["kl_histogram"]) == 32


def test_token_that_the_reference_would_not_write_fails(
    build: LogBuilder, context: StageContext
) -> None:
    right: list[int] = []

    def change(sent: dict[str, Any]) -> None:
        right.extend(sent["text"]["tokens"])
        sent["text"]["tokens"] = [*right[:10], (right[10] + 1) % 256, *right[11:]]

    verdict = judged(build, context, change)
    assert failed(verdict) == {"text"}
    text = verdict.details["text"]
    assert (text["first_divergence"], text["near_tie"]) == (10, False)
    assert text["margin"] > 2 * text["noise"]
    assert text["reference"] != text["board"]


def test_divergence_within_the_noise_is_a_near_tie(
    build: LogBuilder, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "NOISE_FLOOR", 1e6)

    def change(sent: dict[str, Any]) -> None:
        sent["text"]["tokens"] = [(token + 1) % 256 for token in sent["text"]["tokens"]]

    verdict = judged(build, context, change)
    assert verdict.outcome == Outcome.PASS
    assert verdict.details["text"]["near_tie"]


def test_stricter_cosine_of_the_budget_is_kept(build: LogBuilder, stage_context: Contexts) -> None:
    context = stage_context(board={"budget": {"min_cosine": 1.0}}, accuracy_positions=32)
    assert "min_cosine" in failed(judged(build, context))


def test_append_that_disturbs_other_slots_fails(build: LogBuilder, context: StageContext) -> None:
    verdict = judged(build, context, lambda sent: sent["disturbed"].append("L01.v"))
    assert failed(verdict) == {"cache_undisturbed"}


def test_repetition_rate_counts_repeated_four_grams() -> None:
    assert agreement.repetition_rate([1, 2, 3]) == 0.0
    assert agreement.repetition_rate(list(range(50))) == 0.0
    assert agreement.repetition_rate([1, 2, 3, 4] * 25) == pytest.approx(1 - 4 / 97)


def test_plan_fits_text_and_question_into_the_context(context: StageContext) -> None:
    plan = accuracy.STAGE.plan(context)
    parameters = plan.spec.parameters
    assert parameters["max_new"] == 24
    assert parameters["context"] <= context.model.hyperparameters.context
    assert plan.inputs is not None
    with np.load(plan.inputs) as file:
        assert {"tokens", "rows", "prompt", "cache.L00.k", "buffer.L01.ffn.act"} <= set(file.files)
