"""References are made once, by an engine without faults; prompts follow the model's template."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import Decoder
from engine.options import EngineOptions
from engine.package import Package
from engine.runtime.trace import Taps
from harness.deploy.models import PreparedModel
from harness.errors import HarnessError
from harness.jobs import base, prompts, references, stages
from harness.jobs.base import StageContext

Contexts = Callable[..., StageContext]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    return tmp_path / "references"


def test_three_boards_that_ask_at_once_compute_once(own_cache: Path) -> None:
    calls = []

    def make() -> dict[str, Any]:
        calls.append(1)
        time.sleep(0.2)
        return {"x": np.arange(3)}

    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(references.cached("t", ["k"], make)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert [list(item["x"]) for item in found] == [[0, 1, 2]] * 3


def test_different_references_are_never_computed_side_by_side(own_cache: Path) -> None:
    inside, most = [], []

    def make() -> dict[str, Any]:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return {"x": np.zeros(1)}

    def nested() -> dict[str, Any]:  # as the inputs are made from the aligned reference
        return references.cached("t", [0], make)

    asked = [(number, make) for number in range(4)] + [(9, nested)]
    threads = [
        threading.Thread(target=references.cached, args=("t", [number], how), daemon=True)
        for number, how in asked
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert max(most) == 1


def test_reference_that_exists_is_read_while_another_is_computed(own_cache: Path) -> None:
    references.cached("t", ["there"], lambda: {"x": np.ones(1)})
    found: list[Any] = []

    def slow() -> dict[str, Any]:
        reader = threading.Thread(
            target=lambda: found.append(references.cached("t", ["there"], dict)), daemon=True
        )
        reader.start()
        reader.join(timeout=30)
        return {"x": np.zeros(1)}

    references.cached("t", ["slow"], slow)
    assert len(found) == 1


def test_taps_keep_the_wanted_positions_only(tiny_model: PreparedModel) -> None:
    tokens = prompts.text_tokens(tiny_model, 150)  # more than one piece of a prefill
    rows = np.array([0, 1, 127, 128, 149])
    with Package.open(tiny_model.package) as package:
        decoder = references.decoder_of(package, references.PLAIN, len(tokens))
        whole, some = Taps(None), references.RowTaps(rows)
        decoder.advance(tokens, taps=whole, all_logits=True)
        decoder.reset()
        decoder.advance(tokens, taps=some, all_logits=True)
    assert set(some.values) == set(whole.values)
    for name in whole.values:
        assert np.array_equal(some.stacked(name), whole.stacked(name)[rows]), name
    held = sum(part.nbytes for parts in some.values.values() for part in parts)
    assert held * 30 == sum(part.nbytes for parts in whole.values.values() for part in parts)


def test_noise_is_that_of_the_naive_logits(tiny_model: PreparedModel) -> None:
    plain, tokens = references.PLAIN, prompts.text_tokens(tiny_model, 40)
    aligned = references.aligned(tiny_model, plain, tokens, references.spread_rows(40, 5))
    with Package.open(tiny_model.package) as package:
        naive = references.decoder_of(package, plain, 40).advance(tokens, all_logits=True)
    assert aligned.noise == references.logit_difference(aligned.logits, naive)
    assert 0 < aligned.noise < 1e-3


def test_logit_difference_ignores_what_softmax_ignores() -> None:
    logits = np.random.default_rng(0).normal(size=(40, 9))
    assert references.logit_difference(logits, logits + 5) == pytest.approx(0, abs=1e-12)
    other = logits.copy()
    other[33, logits[33].argmin()] -= 0.25
    assert references.logit_difference(logits, other) == pytest.approx(0.25)


def test_other_code_makes_other_references(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references.cached("t", ["k"], lambda: {"x": np.zeros(1)})
    monkeypatch.setattr(references, "code_hash", lambda: "changed")
    assert references.cached("t", ["k"], lambda: {"x": np.ones(1)})["x"] == 1


def test_failed_computation_leaves_nothing(own_cache: Path) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        references.cached("t", ["k"], fail)
    assert list(own_cache.glob("*.npz")) == []
    assert references.cached("t", ["k"], lambda: {"x": np.ones(1)})["x"] == 1


def test_old_references_are_pruned_and_recent_ones_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "KEEP_FILES", 2)
    old = time.time() - 3 * references.KEEP_S
    for number in range(4):
        path = references.cached_file("t", [number], lambda: {"x": np.zeros(1)})
        if number < 2:
            os.utime(path, (old + number, old + number))
    references.cached_file("t", [9], lambda: {"x": np.zeros(1)})
    assert len(list(own_cache.glob("*.npz"))) == 3


def test_reference_with_a_planted_fault_is_refused(
    own_cache: Path, tiny_model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "scale:1.02@L00.ffn.down")
    with pytest.raises(HarnessError, match="ENGINE_FAULT"):
        references.aligned(tiny_model, references.PLAIN, np.arange(20), np.array([0, 19]))


def test_naive_errors_are_those_of_float32(tiny_model: PreparedModel) -> None:
    plain, tokens = references.PLAIN, prompts.text_tokens(tiny_model, 32)
    aligned = references.aligned(tiny_model, plain, tokens, references.spread_rows(32, 5))
    for name, want in aligned.reference.items():
        assert want.dtype == np.float64
        scale = np.abs(want).max() or 1.0
        for got in (aligned.local[name], aligned.free[name]):
            assert np.abs(got - want).max() / scale < 1e-5, name


def test_rows_are_the_first_two_and_the_last_positions() -> None:
    assert references.spread_rows(96, 6).tolist() == [0, 1, 92, 93, 94, 95]
    assert references.spread_rows(3, 3).tolist() == [0, 1, 2]
    assert references.spread_rows(96, 3).tolist() == [0, 94, 95]  # two at the end: a prefill


def test_text_check_finds_the_first_foreign_token(tiny_model: PreparedModel) -> None:
    prompt = [1, 2, 3, 4]
    text = references.continuation(tiny_model, prompt, 12)
    assert (
        references.checked_text(tiny_model, references.PLAIN, prompt, text).first_divergence is None
    )
    wrong = [*text[:7], (text[7] + 1) % 256, *text[8:]]
    checked = references.checked_text(tiny_model, references.PLAIN, prompt, wrong)
    assert checked.first_divergence == 7
    assert checked.best[7] == text[7]
    assert checked.deficit[7] >= checked.margin[7] > 0


def test_text_check_of_a_text_longer_than_one_piece(tiny_model: PreparedModel) -> None:
    text = references.continuation(tiny_model, [3, 4], 140)
    wrong = [*text[:131], (text[131] + 1) % 256, *text[132:]]
    checked = references.checked_text(tiny_model, references.PLAIN, [3, 4], wrong)
    assert len(checked.best) == len(checked.deficit) == len(checked.margin) == 140
    assert (checked.first_divergence, checked.best[131]) == (131, text[131])


def test_text_check_of_a_one_token_prompt(tiny_model: PreparedModel) -> None:
    text = references.continuation(tiny_model, [5], 3)
    assert references.checked_text(tiny_model, references.PLAIN, [5], text).first_divergence is None


def test_dialogue_reads_as_the_template_writes_it(tiny_model: PreparedModel) -> None:
    tokenizer = prompts.tokenizer(tiny_model)
    assert tokenizer is not None
    dialogue = prompts.dialogue(tiny_model, 2, 3)
    answer = "It is."
    ids = [*dialogue.first, *tokenizer.encode(answer, add_special=False), *dialogue.later[0]]
    whole = tokenizer.chat(
        [
            {"role": "user", "content": prompts.TURNS[2]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": prompts.TURNS[3]},
        ]
    )
    assert tokenizer.decode(ids, special=True) == tokenizer.decode(
        tokenizer.encode(whole, add_special=False), special=True
    )


def test_model_without_a_tokenizer_gets_ids_of_its_vocabulary(tiny_model: PreparedModel) -> None:
    bare = dataclasses.replace(tiny_model, tokenizer=None)
    assert prompts.tokenizer(bare) is None
    tokens = prompts.text_tokens(bare, 300, seed=4)
    assert tokens.shape == (300,)
    assert tokens.min() >= 0 and tokens.max() < bare.hyperparameters.vocab
    assert len(set(tokens.tolist())) > 50
    dialogue = prompts.dialogue(bare, 0, 3)
    assert dialogue.first and len(dialogue.later) == 2
    assert prompts.decode(bare, [1, 2]) == "1 2"
    assert prompts.stop_ids(bare) == []


def test_text_longer_than_the_sample_repeats_it(tiny_model: PreparedModel) -> None:
    tokens = prompts.text_tokens(tiny_model, 5000)
    assert tokens.shape == (5000,)
    with Package.open(tiny_model.package) as package:
        Decoder(package, context=64).advance(tokens[:64])  # all within the vocabulary


def test_spec_carries_the_boards_threads_pins_and_the_models_hash(stage_context: Contexts) -> None:
    context = stage_context(board={"threads": 3, "pin": "big"}, seed=9)
    spec = base.make_spec(context, "tiny", {}, deadline_s=60, stall_s=30)
    assert (spec.threads, spec.pin, spec.seed) == (3, (2, 3), 9)
    assert spec.package_sha256 == context.model.sha256
    auto = base.make_spec(stage_context(), "tiny", {}, deadline_s=60, stall_s=30)
    assert auto.threads is None


def test_the_patience_with_a_silent_engine_is_the_stages_unless_the_user_sets_it(
    stage_context: Contexts,
) -> None:
    context = stage_context()
    for stage in stages():
        spec = stage.plan(context).spec
        assert spec.stall_s is not None
        assert 60 < spec.stall_s < spec.deadline_s
        hasty = stage.plan(stage_context(stall_seconds=7.0)).spec
        assert (hasty.stall_s, hasty.deadline_s) == (7.0, spec.deadline_s)


def test_tiny_stage_gets_the_tiny_model_and_others_the_real_one(tiny_model: PreparedModel) -> None:
    options = base.BringupOptions(seed=7)
    by_name = {stage.name: base.stage_model(stage, tiny_model, options).name for stage in stages()}
    assert by_name["tiny"] == "tiny-7"
    assert by_name["stress"] == tiny_model.name


def test_a_definition_is_what_is_computed_not_how() -> None:
    fast = EngineOptions.for_unit("native")
    slow = dataclasses.replace(
        fast, executor="sync", threads=4, huge_pages=True, kv_layout="ds", kernels="generic"
    )
    assert references.definition_of(fast) == references.definition_of(slow)
    other = dataclasses.replace(fast, kv="int8")
    assert references.definition_of(other) != references.definition_of(fast)
    assert references.definition_of(EngineOptions()) == references.PLAIN


def test_a_scheme_of_few_bits_is_judged_by_floats_with_its_own_noise(
    tiny_model: PreparedModel,
) -> None:
    tokens = prompts.text_tokens(tiny_model, 40)
    coarse = references.definition_of(EngineOptions(kv="int4", kv_layout="sd"))
    fine = references.definition_of(EngineOptions(kv="int8", kv_layout="sd"))
    assert references.judging(coarse) == references.PLAIN
    assert references.judging(references.PLAIN) == references.PLAIN
    noise = [references.scheme_noise(tiny_model, way, tokens) for way in (fine, coarse)]
    assert noise[0].between < noise[1].between
    assert noise[0].alone < noise[1].alone
    exact = references.scheme_noise(tiny_model, references.PLAIN, tokens)
    assert exact.alone == 0.0


def test_references_of_a_scheme_hold_what_its_cache_holds(tiny_model: PreparedModel) -> None:
    """The naive run on the reference's inputs is as close as with floats: it has the same codes."""
    tokens, rows = prompts.text_tokens(tiny_model, 32), references.spread_rows(32, 5)
    way = references.definition_of(EngineOptions(kv="int4", kv_layout="ds", fused=True))
    aligned = references.aligned(tiny_model, way, tokens, rows)
    for name, want in aligned.reference.items():
        error = np.linalg.norm(aligned.local[name].astype(np.float64) - want)
        assert error <= 1e-5 * np.linalg.norm(want), name
    assert np.abs(aligned.plain - aligned.logits).max() > 1e-3  # and its loss shows against floats
