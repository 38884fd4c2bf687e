"""The accuracy stage against engines that are wrong only in some of their ways to run."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.decode
from engine.decode import Decoder
from engine.measure import alignment
from engine.measure.context import JobContext
from engine.options import EngineOptions
from engine.package import Package
from engine.program.ops import Op
from engine.records import Event
from engine.runtime.state import State
from engine.spool import array_file
from engine.units import Unit, load_unit
from engine.units.faulty import Faulty, parse
from harness.boards.facts import Facts
from harness.deploy.models import PreparedModel, prepare_tiny
from harness.inventory import Board
from harness.jobs import accuracy
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.engines import EngineChoice
from harness.jobs.runlog import RunLog
from harness.verdicts import Outcome, Verdict

Align = Callable[[], tuple[Verdict, RunLog]]


class Sometimes(Faulty):
    """A planted fault that shows only where `when` says so of an op's inputs."""

    def __init__(self, unit: Unit, text: str, when: Callable[[State], bool]) -> None:
        super().__init__(unit, parse(text), text)
        self.when = when

    def execute(self, op: Op, state: State) -> None:
        if self.when(state):
            super().execute(op, state)
        else:
            self.unit.execute(op, state)


def in_prefill(state: State) -> bool:
    return len(state["positions"]) > 1


def in_long_prefill(state: State) -> bool:
    return len(state["positions"]) > 8


def in_decode(state: State) -> bool:
    return len(state["positions"]) == 1


@pytest.fixture(scope="session")
def small_model() -> PreparedModel:
    return prepare_tiny(11)


@pytest.fixture
def context(small_model: PreparedModel, tmp_path: Path) -> StageContext:
    return StageContext(
        board=Board(name="here", host="192.0.2.1"),
        facts=Facts(machine="here", kernel="Linux"),
        model=small_model,
        options=BringupOptions(accuracy_tokens=30, accuracy_positions=48),
        run_id="run-1",
        remote_package=str(small_model.package),
        cache=tmp_path / "inputs",
        engine=EngineChoice(EngineOptions()),
    )


@pytest.fixture
def afflicted() -> dict[str, Any]:
    """`text` and `when` of a fault for `aligned`'s engine; empty: none."""
    return {}


@pytest.fixture
def aligned(
    context: StageContext, align_with: Callable[[StageContext], tuple[Verdict, RunLog]]
) -> Align:
    """Plan, run in this process with the fault, judge without it."""
    return lambda: align_with(context)


@pytest.fixture
def align_with(
    afflicted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[StageContext], tuple[Verdict, RunLog]]:
    """As `aligned`, with any context."""

    def load(name: str, package: Package, **options: Any) -> Unit:
        return Sometimes(load_unit(name, package, **options), **afflicted)

    def run(context: StageContext) -> tuple[Verdict, RunLog]:
        plan = accuracy.STAGE.plan(context)
        told: list[tuple[str, Mapping[str, Any]]] = [
            ("run-start", {"run_id": "run-1"}),
            ("engine-start", {"attempt": 0, "pid": 1}),
            ("ready", {"attempt": 0}),
        ]
        spec = type(plan.spec)(**{**vars(plan.spec), "inputs": str(plan.inputs)})
        spool = tmp_path / "spool"
        spool.mkdir()
        with Package.open(context.model.package) as package, monkeypatch.context() as patch:
            if afflicted:
                patch.setattr(engine.decode, "load_unit", load)
            now = time.monotonic_ns()
            alignment.run(
                JobContext(spec, package, spool, 0, now, lambda *event: told.append(event))
            )
        told.append(("engine-exit", {"attempt": 0, "planned": False, "code": 0}))
        told.append(("run-end", {"status": "finished"}))
        events = [Event(n, n, kind, dict(data)) for n, (kind, data) in enumerate(told)]
        log = RunLog("run-1", events, spool, "finished", "")
        return accuracy.STAGE.judge(context, log), log

    return run


def failed(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if check.outcome == Outcome.FAIL}


def bad_ops(verdict: Verdict, mode: str) -> list[str]:
    return [
        row["op"]
        for row in verdict.details["ops"]
        if row["mode"] == mode and row["outcome"] == Outcome.FAIL
    ]


def test_sound_engine_passes_with_prefill_compared(aligned: Align) -> None:
    verdict, log = aligned()
    assert verdict.outcome == Outcome.PASS, verdict.headline
    assert (log.folder / array_file("prefill")).is_file()
    assert verdict.details["text"]["tokens"] == 30


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("scale:1.02@L01.ffn.down", "L01.ffn.down"),
        ("shift:1@L01.attn.rope", "L01.attn.rope"),
        ("zero-row:5@L00.attn.out", "L00.attn.out"),
        ("stale@L00.attn.kv", "L00.attn.kv"),
        ("scale:1.02@head.logits", "head.logits"),
        ("nan@L01.attn.mix", "L01.attn.mix"),
    ],
)
@pytest.mark.parametrize(
    ("when", "mode", "other"),
    [(in_prefill, "prefill", "local"), (in_decode, "local", "prefill")],
    ids=["prefill", "decode"],
)
def test_op_that_is_wrong_in_one_way_to_run_is_named(
    fault: str,
    op: str,
    when: Callable[[State], bool],
    mode: str,
    other: str,
    aligned: Align,
    afflicted: dict[str, Any],
) -> None:
    afflicted.update(text=fault, when=when)
    verdict, _ = aligned()
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, op)
    assert bad_ops(verdict, mode) == [op]
    assert bad_ops(verdict, other) == []
    assert ("in prefill" in verdict.headline) == (mode == "prefill")
    assert "repeatable" not in failed(verdict)  # the same bits each time, bad ones too


@pytest.mark.parametrize("fault", ["scale:1.1@L00.ffn.down", "shift:1@L01.attn.rope"])
def test_fault_of_long_pieces_only_is_found_in_the_engines_own_run(
    fault: str, aligned: Align, afflicted: dict[str, Any]
) -> None:
    afflicted.update(text=fault, when=in_long_prefill)
    verdict, _ = aligned()
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, None)
    assert "free_drift" in failed(verdict)
    assert bad_ops(verdict, "local") == bad_ops(verdict, "prefill") == []


def test_bad_numbers_that_come_back_each_time_are_no_race(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step number that grows over the repetitions must not make them differ.
    monkeypatch.setattr(Decoder, "reset", lambda self: setattr(self, "position", 0))
    monkeypatch.setattr(
        engine.decode,
        "load_unit",
        lambda *given, **options: Sometimes(
            load_unit(*given, **options), "nan@L01.attn.out", in_decode
        ),
    )
    with Package.open(context.model.package) as package:
        told = alignment.repeat(Decoder(package, context=64), np.arange(40, dtype=np.int64))
    assert len(told["hashes"]) == alignment.REPEATS
    assert len(set(told["hashes"])) == 1
    assert "L01.attn.out" in told["hashes"][0]


def test_last_piece_is_the_consecutive_positions_at_the_end() -> None:
    assert alignment.last_piece(np.array([0, 1, 92, 93, 94, 95])) == (2, 6)
    assert alignment.last_piece(np.arange(5)) == (0, 5)
    assert alignment.last_piece(np.array([0, 1, 9])) is None
    assert alignment.last_piece(np.array([0])) is None


def test_bits_that_differ_are_looked_at_again_with_one_op_after_the_other(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Noise in one op, on the threads of the async executor alone: what a race looks like.
    noise = np.random.default_rng(0)

    class Racy(Faulty):
        def execute(self, op: Op, state: State) -> None:
            self.unit.execute(op, state)
            if (
                op.id == "L00.ffn.down"
                and threading.current_thread() is not threading.main_thread()
            ):
                state[op.writes[0]] = state[op.writes[0]] * np.float32(1 + noise.normal() * 1e-3)

    monkeypatch.setattr(
        engine.decode, "load_unit", lambda *a, **k: Racy(load_unit(*a, **k), [], "")
    )
    options = EngineOptions(executor="async")
    with Package.open(context.model.package) as package:
        decoder = Decoder(package, options=options, context=64)
        try:
            told = alignment.repeat(decoder, np.arange(40, dtype=np.int64))
            in_order = alignment.repeat(
                alignment.one_after_the_other(decoder), np.arange(40, dtype=np.int64)
            )
        finally:
            decoder.close()
    assert len(set(told["hashes"])) > 1
    assert len(set(in_order["hashes"])) == 1


def test_further_texts_come_back_as_logits_of_their_own(
    context: StageContext, align_with: Callable[[StageContext], tuple[Verdict, RunLog]]
) -> None:
    options = context.options.model_copy(update={"accuracy_prompts": 3})
    verdict, log = align_with(dataclasses.replace(context, options=options))
    assert verdict.outcome == Outcome.PASS, verdict.headline
    assert verdict.details["logits"]["prompts"] == 3
    assert [len(log.arrays(f"passage_{n}")["shifted"]) for n in range(2)] == [48, 48]
