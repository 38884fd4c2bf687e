"""The stages with the native unit: plan, run and judge for real, on a quantised small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.native.library import NativeUnavailable, load
from harness.boards.facts import Facts
from harness.deploy.models import PreparedModel, in_layout, prepare_model
from harness.inventory import Board
from harness.jobs import stages
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.engines import choose_engine, layout_of
from harness.jobs.ladder import LADDER
from harness.jobs.local import run_here
from harness.jobs.profile import PROFILE
from harness.jobs.runlog import RunLog
from harness.verdicts import Outcome, Verdict

Run = Callable[..., tuple[Verdict, RunLog]]
OPTIONS: dict[str, Any] = {
    "stress_minutes": 0.1,
    "curve_seconds": 3.0,
    "profile_seconds": 1.0,
    "stress_context": 96,
    "accuracy_tokens": 24,
    "accuracy_positions": 32,
}


@pytest.fixture(scope="module")
def library() -> str:
    """The path of the native library, built on first use."""
    try:
        return str(load().path)
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")


@pytest.fixture(scope="module")
def quantised_model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    source = SyntheticCheckpoint(seed=5, layers=3)
    matrices = [name for name, info in source.tensors.items() if len(info.shape) > 1]
    write_gguf(source, path, types=dict.fromkeys(matrices, "Q4_1"))
    return prepare_model(path)


@pytest.fixture
def run(quantised_model: PreparedModel, library: str, tmp_path: Path) -> Run:
    """`run(stage, fault, layout=…, **engine)`."""

    def make(
        name: str, fault: str | None = None, *, layout: str | None = None, **engine: Any
    ) -> tuple[Verdict, RunLog]:
        stage = next(stage for stage in [*stages(), LADDER, PROFILE] if stage.name == name)
        board, facts = Board(name="here", virtual={}), Facts(machine="here", kernel="Linux")
        asked = BringupOptions(**{**OPTIONS, "engine": {"unit": "native", **engine}})
        choice = choose_engine(board, facts, asked.engine)
        model = in_layout(quantised_model, layout or layout_of(choice.options.unit))
        context = StageContext(
            board=board,
            facts=facts,
            model=model,
            options=asked,
            run_id="run-1",
            remote_package=str(model.package),
            cache=tmp_path / "inputs",
            engine=choice,
        )
        environment = {"ENGINE_NATIVE_LIB": library, **({"ENGINE_FAULT": fault} if fault else {})}
        log = run_here(stage.plan(context), tmp_path / "spool", environment)
        return stage.judge(context, log), log

    return make


def problems(verdict: Verdict) -> list[str]:
    return [check.sentence for check in verdict.checks if check.outcome == Outcome.FAIL]


@pytest.mark.parametrize("name", ["accuracy", "curve", "stress", "ladder"])
def test_the_native_unit_passes_and_says_what_ran(name: str, run: Run) -> None:
    verdict, log = run(name)
    assert problems(verdict) == []
    assert verdict.outcome in (Outcome.PASS, Outcome.WARN), verdict
    assert log.ready is not None
    assert (log.ready["unit"], log.ready["layout"]) == ("native", "interleaved")
    assert log.ready["engine"]["executor"] == "compiled"


@pytest.mark.parametrize(
    "engine",
    [
        {"executor": "sync", "fused": False},
        {"executor": "async", "kv": "f32", "kv_layout": "sd"},
        {"kv": "int8", "kv_layout": "ds"},
        {"activations": "float", "passes_off": ("qkv", "residual")},
    ],
    ids=["unfused", "async", "int8 cache", "float"],
)
def test_every_way_to_run_agrees_with_its_own_definition(engine: dict[str, Any], run: Run) -> None:
    verdict, _ = run("accuracy", **engine)
    assert problems(verdict) == []
    worst = max(row["worst_row_rel_l2"] for row in verdict.details["ops"] if row["mode"] == "local")
    assert worst < 1e-4  # whatever is rounded to codes belongs to the definition


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("scale:1.02@L01.ffn.down", "L01.ffn.down"),
        ("scale:1.02@L02.attn.out", "L02.attn.out"),
        ("zero-row:5@L00.ffn.up", "L00.ffn.gate_up"),
        ("stale@L00.attn.kv", "L00.attn.mix"),
        ("shift:1@L01.attn.rope", "L01.attn.mix"),
        ("nan@L01.attn.out", "L01.attn.out"),
    ],
)
def test_a_planted_fault_is_named_by_the_fused_op_that_holds_it(
    fault: str, op: str, run: Run
) -> None:
    verdict, _ = run("accuracy", fault)
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, op)


def test_the_ceiling_is_the_best_read_in_the_same_threads(run: Run) -> None:
    verdict, log = run("curve", threads=1)
    told = log.data("bandwidth")
    assert told["gb_s"] >= told["linear_gb_s"] > 0
    assert told["what"].startswith("the best read found: 1 thread, ")
    assert verdict.details["bandwidth_gb_s"] == told["gb_s"]


def test_a_layout_without_fast_kernels_fails_the_speed_by_name(run: Run) -> None:
    verdict, _ = run("curve", layout="blocked")
    assert verdict.outcome == Outcome.FAIL
    (check,) = [check for check in verdict.checks if check.outcome == Outcome.FAIL]
    assert check.name == "kernels"
    assert "not interleaved" in check.sentence


@pytest.mark.parametrize("executor", ["sync", "async", "compiled"])
def test_a_profile_adds_up_with_every_executor(executor: str, run: Run) -> None:
    verdict, _ = run("profile", executor=executor)
    assert verdict.outcome in (Outcome.PASS, Outcome.WARN), verdict
    found = verdict.details
    assert all(op["deep_us"] > 0 for op in found["ops"])
    for depth, times in zip(found["depths"], ("shallow_us", "deep_us"), strict=True):
        total = sum(op[times] for op in found["ops"]) / 1e3
        rest = total - depth["overlap_ms"] + depth["residual_ms"]
        assert rest == pytest.approx(depth["traced_ms"])
    head = next(op for op in found["groups"] if op["op"] == "head.logits")
    assert head["bytes"] > 0 and head["gb_s"] > 0
    assert sum(op["bytes"] for op in found["ops"]) == pytest.approx(
        found["depths"][-1]["bytes"], rel=0.02
    )


def test_a_profile_of_slow_kernels_fails_and_names_them(run: Run) -> None:
    verdict, _ = run("profile", layout="blocked")
    assert verdict.outcome == Outcome.FAIL
    assert verdict.details["bottleneck"] == "fallback"
    assert "slow kernel" in verdict.headline


def test_a_cache_of_too_few_bits_is_told_by_its_loss_not_by_an_op(run: Run) -> None:
    verdict, _ = run("accuracy", unit="packed", kv="int4", kv_layout="sd")
    rows = [row for row in verdict.details["ops"] if row["mode"] != "free"]
    assert {row["outcome"] for row in rows} == {"pass"}
    assert verdict.culprit is None
    assert verdict.details["logits"]["mean_kl"] > 1e-4
