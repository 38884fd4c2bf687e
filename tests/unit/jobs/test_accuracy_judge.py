"""The accuracy stage's judgement, on what the reference itself would have sent, changed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.measure.alignment import last_piece, shifted
from harness.jobs import accuracy, agreement, pace, prompts, references
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
    aligned = references.aligned(context.model, references.PLAIN, tokens, rows)
    text = references.continuation(context.model, question, 24)
    start, _ = last_piece(rows) or (0, 0)
    sent: dict[str, Any] = {
        "repeat": {"hashes": ["aa"] * 5, "steps": 3, "prefill": 8},
        "taps": {"with": "cc", "without": "cc"},
        "free_told": {"positions": len(tokens), "stopped": None},
        "free": dict(aligned.free),
        "local": dict(aligned.local),
        "prefill": {name: value[start:] for name, value in aligned.local.items()},
        "disturbed": [],
        "disturbed_in_prefill": [],
        "logits": aligned.logits.copy(),
        "text": {"tokens": text, "finish": "length", "stopped": None},
        "in_order": None,
        "passages": [
            references.plain_logits(context.model, passage).copy()
            for passage in accuracy.further(context, tokens)
        ],
    }
    change(sent)
    build.started()
    for name, told in (
        ("repeat", sent["repeat"]),
        ("taps", sent["taps"]),
        ("free", sent["free_told"]),
        ("local", {"disturbed": sent["disturbed"]}),
        ("prefill", {"disturbed": sent["disturbed_in_prefill"]}),
        ("text", sent["text"]),
        ("repeat_in_order", sent["in_order"]),
    ):
        if told is not None:
            build.data(name, told)
    for name in ("free", "local", "prefill"):
        if sent[name]:
            build.arrays(name, **sent[name])
    if sent["logits"] is not None:
        build.arrays("logits", shifted=shifted(sent["logits"]))
    for number, logits in enumerate(sent["passages"]):
        build.arrays(f"passage_{number}", shifted=shifted(logits))
        build.data("passage", {"positions": len(logits), "stopped": None})
    return accuracy.STAGE.judge(context, build.ended())


def failed(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if check.outcome == Outcome.FAIL}


def scaled(sent: dict[str, Any], run: str, name: str, factor: float = 1.02) -> None:
    sent[run][name] = sent[run][name] * np.float32(factor)


def test_naive_implementation_passes(build: LogBuilder, context: StageContext) -> None:
    verdict = judged(build, context)
    assert verdict.outcome == Outcome.PASS, verdict.checks
    assert verdict.details["logits"]["top1"] == 1.0
    assert verdict.details["logits"]["mean_kl"] < 1e-4
    assert verdict.details["text"]["first_divergence"] is None
    modes = [row["mode"] for row in verdict.details["ops"]]
    assert modes.count("local") == modes.count("prefill") == modes.count("free") > 20
    assert {"complete", "ops_local", "ops_prefill", "free_drift"} <= {
        check.name for check in verdict.checks
    }


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


def test_op_that_is_wrong_for_several_tokens_only_is_named(
    build: LogBuilder, context: StageContext
) -> None:
    verdict = judged(build, context, lambda sent: scaled(sent, "prefill", "L01.ffn.down"))
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, "L01.ffn.down")
    assert failed(verdict) == {"ops_prefill"}
    assert "in prefill" in verdict.headline


def test_the_earlier_of_a_decode_and_a_prefill_failure_is_named(
    build: LogBuilder, context: StageContext
) -> None:
    def change(sent: dict[str, Any]) -> None:
        scaled(sent, "local", "L01.ffn.down")
        scaled(sent, "prefill", "L00.attn.q")

    assert judged(build, context, change).culprit == "L00.attn.q"


def test_drift_alone_fails_and_blames_nobody(build: LogBuilder, context: StageContext) -> None:
    def change(sent: dict[str, Any]) -> None:
        for name in ("L01.attn.mix", "L01.attn.out"):
            scaled(sent, "free", name)

    verdict = judged(build, context, change)
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, None)
    assert failed(verdict) == {"free_drift"}
    assert "only when the engine runs on its own: prefill, cache or positions" in verdict.headline


def test_logits_of_one_position_between_the_rows_fail(
    build: LogBuilder, context: StageContext
) -> None:
    def change(sent: dict[str, Any]) -> None:
        # Of one position in 32: the mean of the divergence hides it.
        sent["logits"][17] *= np.float32(1.01)

    verdict = judged(build, context, change)
    assert (failed(verdict), verdict.culprit) == ({"free_drift"}, None)
    assert "logits of position 17" in verdict.checks[6].sentence


def test_drift_that_a_wrong_op_explains_is_no_failure_of_its_own(
    build: LogBuilder, context: StageContext
) -> None:
    def change(sent: dict[str, Any]) -> None:
        scaled(sent, "local", "L01.ffn.down")
        scaled(sent, "free", "L01.ffn.add")

    verdict = judged(build, context, change)
    assert (failed(verdict), verdict.culprit) == ({"ops_local"}, "L01.ffn.down")


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
    assert failed(verdict) == {"mean_kl", "free_drift"}
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


def test_near_tie_does_not_excuse_wrong_tokens_after_it(
    build: LogBuilder, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    deficit = np.zeros(24)
    deficit[3], deficit[20:] = 1.5 * agreement.NOISE_FLOOR, 9.0
    told = references.CheckedText(np.arange(24), deficit, np.ones(24))
    monkeypatch.setattr(references, "checked_text", lambda *given: told)
    verdict = judged(build, context)
    assert failed(verdict) == {"text"}
    text = verdict.details["text"]
    assert (text["first_divergence"], text["near_tie"], text["margin"]) == (20, False, 9.0)


def test_broken_board_does_not_widen_its_own_tolerance(
    build: LogBuilder, context: StageContext
) -> None:
    def change(sent: dict[str, Any]) -> None:
        scaled(sent, "free", "head.logits", 3.0)

    noise = judged(build, context, change).details["text"]["noise"]
    assert noise == agreement.NOISE_FLOOR


def test_tolerance_follows_the_naive_implementation() -> None:
    assert agreement.logit_noise(0.0) == agreement.NOISE_FLOOR
    assert agreement.logit_noise(0.01) == pytest.approx(0.03)


def test_stricter_cosine_of_the_budget_is_kept(build: LogBuilder, stage_context: Contexts) -> None:
    context = stage_context(board={"budget": {"min_cosine": 1.0}}, accuracy_positions=32)
    assert "min_cosine" in failed(judged(build, context))


def test_append_that_disturbs_other_slots_fails(build: LogBuilder, context: StageContext) -> None:
    verdict = judged(build, context, lambda sent: sent["disturbed"].append("L01.v"))
    assert failed(verdict) == {"cache_undisturbed"}


def test_prefill_that_disturbs_other_slots_fails(build: LogBuilder, context: StageContext) -> None:
    verdict = judged(build, context, lambda sent: sent["disturbed_in_prefill"].append("L00.k"))
    assert failed(verdict) == {"cache_undisturbed"}


def _no_layer(run: str) -> Change:
    def change(sent: dict[str, Any]) -> None:
        sent[run] = {name: a for name, a in sent[run].items() if not name.startswith("L01.")}

    return change


def _first_row(run: str) -> Change:
    def change(sent: dict[str, Any]) -> None:
        sent[run] = {name: value[:1] for name, value in sent[run].items()}

    return change


def _without(name: str) -> Change:
    return lambda sent: sent.update({name: None})


def _change(**changed: Any) -> Change:
    def change(sent: dict[str, Any]) -> None:
        for name, how in changed.items():
            sent[name] = how(sent[name])

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(_no_layer("local"), "local run, first L01.attn.norm", id="layer of local"),
        pytest.param(_no_layer("prefill"), "prefill run, first L01", id="layer of prefill"),
        pytest.param(_no_layer("free"), "free run, first L01", id="layer of free"),
        pytest.param(_first_row("local"), "there are 1 of 6", id="rows of local"),
        pytest.param(_first_row("prefill"), "there are 1 of 4", id="rows of prefill"),
        pytest.param(_first_row("free"), "there are 1 of 6", id="rows of free"),
        pytest.param(_without("local"), "outputs of the local run", id="local"),
        pytest.param(_without("prefill"), "outputs of the prefill run", id="prefill"),
        pytest.param(_without("free"), "outputs of the free run", id="free"),
        pytest.param(_without("free_told"), "nothing was told about 'free'", id="end of free"),
        pytest.param(_without("logits"), "logits of 0 of 32", id="logits"),
        pytest.param(_change(logits=lambda x: x[:3]), "logits of 3 of 32", id="some logits"),
        pytest.param(
            _change(repeat=lambda x: {**x, "hashes": x["hashes"][:1]}), "1 of 5 rep", id="repeats"
        ),
        pytest.param(_without("repeat"), "nothing was told about 'repeat'", id="repeat"),
        pytest.param(_change(taps=lambda x: {"with": "cc"}), "with or without taps", id="taps"),
        pytest.param(_without("text"), "nothing was told about 'text'", id="no text"),
        pytest.param(
            _change(text=lambda x: {**x, "tokens": x["tokens"][:1]}), "1 of 24 tokens", id="text"
        ),
        pytest.param(_change(text=lambda x: {**x, "tokens": []}), "0 of 24", id="empty text"),
    ],
)
def test_what_did_not_come_back_makes_the_run_invalid(
    change: Change, words: str, build: LogBuilder, context: StageContext
) -> None:
    verdict = judged(build, context, change)
    assert (verdict.outcome, verdict.culprit) == (Outcome.INVALID, None)
    complete = next(check for check in verdict.checks if check.name == "complete")
    assert complete.outcome == Outcome.INVALID
    assert words in complete.sentence
    assert verdict.headline.startswith(complete.sentence[:60])
    assert verdict.remedy is not None


def _resized(name: str, run: str = "local") -> Change:
    return _change(**{run: lambda sent: {**sent, name: sent[name][:, :-1]}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(_resized("L01.ffn.up"), "L01.ffn.up has 6 rows of 127 values", id="op"),
        pytest.param(_resized("L01.ffn.up", "free"), "free L01.ffn.up has", id="op in free"),
        pytest.param(
            _change(logits=lambda x: x[:, :-1]), "logits have shape (32, 255)", id="vocabulary"
        ),
        pytest.param(
            _change(local=lambda x: {**x, "L01.ffn.up": np.array(["a"] * 6)}), "<U1", id="words"
        ),
        pytest.param(
            _change(prefill=lambda x: {**x, "L01.ffn.up": np.float32(1)}), "shape ()", id="number"
        ),
        pytest.param(
            _change(text=lambda x: {**x, "tokens": [*x["tokens"][:5], 256]}), "below 256", id="id"
        ),
        pytest.param(
            _change(text=lambda x: {**x, "tokens": x["tokens"] * 2}), "at most 24", id="long text"
        ),
        pytest.param(
            _change(local=lambda x: {k: np.repeat(v, 2, axis=0) for k, v in x.items()}),
            "has 12 rows",
            id="rows",
        ),
    ],
)
def test_what_came_back_in_another_shape_fails(
    change: Change, words: str, build: LogBuilder, context: StageContext
) -> None:
    verdict = judged(build, context, change)
    assert verdict.outcome == Outcome.FAIL
    complete = next(check for check in verdict.checks if check.name == "complete")
    assert complete.outcome == Outcome.FAIL
    assert words in complete.sentence


def test_text_that_ends_on_a_stop_id_is_complete(
    build: LogBuilder, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def change(sent: dict[str, Any]) -> None:
        told.extend(sent["text"]["tokens"][:7])
        monkeypatch.setattr(prompts, "stop_ids", lambda model: [told[-1]])
        sent["text"] = {"tokens": told, "finish": "stop", "stopped": None}

    # The stop ids are read when the run is judged, after `change`.
    assert judged(build, context, change).outcome == Outcome.PASS


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


def test_deadline_grows_with_the_package(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accuracy.STAGE.plan(context).spec.deadline_s == accuracy.LEAST_DEADLINE_S
    size = context.model.package.stat().st_size
    monkeypatch.setattr(pace, "SLOWEST_BYTES_PER_S", size / 60)  # a minute for each token
    tokens, _, question = accuracy.subject(context)
    least = 60 * (2 * len(tokens) + len(question) + 24)
    assert least < accuracy.STAGE.plan(context).spec.deadline_s < 2 * least


def test_logits_of_further_texts_are_judged_and_intervals_are_drawn_over_texts(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(accuracy_positions=32, accuracy_tokens=24, accuracy_prompts=4)

    def change(sent: dict[str, Any]) -> None:
        sent["passages"][1][:, 5] += 3.0

    verdict = judged(build, context, change)
    logits = verdict.details["logits"]
    assert (logits["prompts"], logits["positions"]) == (4, 4 * 32)
    # One text of four is far off: over texts nobody knows the mean as well as over positions.
    assert logits["mean_kl_low"] < 0.3 * logits["mean_kl"]
    assert logits["p99_kl_low"] < logits["p99_kl"] <= logits["p99_kl_high"]
    sentence = next(check.sentence for check in verdict.checks if check.name == "mean_kl")
    assert "of 4 texts" in sentence


def test_a_further_text_that_did_not_come_back_is_told(
    build: LogBuilder, stage_context: Contexts
) -> None:
    context = stage_context(accuracy_positions=32, accuracy_tokens=24, accuracy_prompts=3)
    verdict = judged(build, context, lambda sent: sent["passages"].pop())
    assert verdict.outcome == Outcome.INVALID
    assert "passage_1: logits of 0 of 32 positions" in verdict.checks[0].sentence


@pytest.mark.parametrize(
    ("executor", "in_order", "words"),
    [
        ("async", ["aa"] * 5, "a race between ops; `harness bisect race --board bench-1`"),
        ("async", ["aa", "bb", "aa", "aa", "aa"], "even one op after the other"),
        ("async", None, "a race; `harness bisect race --board bench-1`"),
        ("sync", None, "memory that is read before it is written"),
    ],
)
def test_bits_that_differ_from_run_to_run_name_no_op_but_what_to_do(
    executor: str,
    in_order: list[str] | None,
    words: str,
    build: LogBuilder,
    stage_context: Contexts,
) -> None:
    engine = {"unit": "packed", "executor": executor}
    context = stage_context(accuracy_positions=32, accuracy_tokens=24, engine=engine)

    def change(sent: dict[str, Any]) -> None:
        sent["repeat"] = {"hashes": ["aa", "aa", "bb", "aa", "aa"], "steps": 3, "prefill": 8}
        sent["in_order"] = in_order and {"hashes": in_order, "steps": 3, "prefill": 8}
        scaled(sent, "local", "L01.ffn.down")

    verdict = judged(build, context, change)
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, None)
    assert words in (verdict.remedy or "")
