"""Plan, run and judge for real: each stage on a small model, under the supervisor, no board."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.boards.facts import Facts
from harness.deploy.models import PreparedModel, prepare_tiny
from harness.inventory import Board
from harness.jobs import stages
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.engines import choose_engine
from harness.jobs.local import run_here
from harness.jobs.runlog import RunLog
from harness.verdicts import Outcome, Verdict

Run = Callable[..., tuple[Verdict, RunLog]]
OPTIONS: dict[str, Any] = {
    "stress_minutes": 0.1,
    "curve_seconds": 3.0,
    "stress_context": 96,
    "accuracy_tokens": 40,
    "accuracy_positions": 48,
}


@pytest.fixture(scope="session")
def small_model() -> PreparedModel:
    return prepare_tiny(11)


@pytest.fixture
def run(small_model: PreparedModel, tmp_path: Path) -> Run:
    """`run(stage name, fault)`: (verdict, log)."""

    def make(
        name: str,
        fault: str | None = None,
        board: dict[str, Any] | None = None,
        after: int = 0,
        **options: Any,
    ) -> tuple[Verdict, RunLog]:
        stage = next(stage for stage in stages() if stage.name == name)
        described = Board(**{"name": "here", "virtual": {}, **(board or {})})
        facts = Facts(machine="here", kernel="Linux")
        asked = BringupOptions(**{**OPTIONS, "engine": {"unit": "packed"}, **options})
        context = StageContext(
            board=described,
            facts=facts,
            model=small_model,
            options=asked,
            run_id="run-1",
            remote_package=str(small_model.package),
            cache=tmp_path / "inputs",
            engine=choose_engine(described, facts, asked.engine),
        )
        planted = {"ENGINE_FAULT": fault or "", "ENGINE_FAULT_AFTER": str(after)}
        environment = planted if fault else {}
        log = run_here(stage.plan(context), tmp_path / "spool", environment)
        return stage.judge(context, log), log

    return make


def failed(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if check.outcome == Outcome.FAIL}


def test_stages_are_found_by_file_name_in_order() -> None:
    assert [stage.name for stage in stages()] == ["tiny", "accuracy", "curve", "stress"]


@pytest.mark.parametrize("name", ["tiny", "accuracy", "curve", "stress"])
def test_sound_engine_passes(name: str, run: Run) -> None:
    verdict, log = run(name)
    assert verdict.outcome in (Outcome.PASS, Outcome.WARN), verdict
    assert failed(verdict) == set()
    assert verdict.culprit is None
    assert log.status == "finished"
    assert verdict.details


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("scale:1.02@L01.ffn.down", "L01.ffn.down"),
        ("zero-row:5@L00.attn.out", "L00.attn.out"),
        ("shift:1@L01.attn.rope", "L01.attn.rope"),
        ("stale@L00.attn.kv", "L00.attn.kv"),
        ("scale:1.02@head.logits", "head.logits"),
        ("nan@L01.attn.out", "L01.attn.out"),
    ],
)
def test_accuracy_names_the_op_with_a_planted_fault(fault: str, op: str, run: Run) -> None:
    verdict, _ = run("accuracy", fault)
    assert verdict.outcome == Outcome.FAIL
    assert verdict.culprit == op
    assert verdict.details["first_bad_op"] == op
    assert op in verdict.headline
    assert verdict.remedy is not None and fault in verdict.remedy
    local = [row for row in verdict.details["ops"] if row["mode"] == "local"]
    assert [row["op"] for row in local if row["outcome"] == "fail"] == [op]


def test_tiny_finds_a_wrong_token(run: Run) -> None:
    verdict, _ = run("tiny", "zero-row:7@L01.ffn.add;scale:0.5@L00.attn.mix")
    assert verdict.outcome == Outcome.FAIL
    assert "tokens_equal" in failed(verdict)
    assert "board" in verdict.details["first_mismatch"]


def test_tiny_finds_a_leak(run: Run) -> None:
    verdict, _ = run("tiny", "leak:0.01@head.norm")
    assert failed(verdict) == {"memory_stable"}


def test_crash_names_its_signal_and_quotes_the_engine(run: Run) -> None:
    verdict, _ = run("curve", "signal:11@L01.ffn.down")
    assert verdict.outcome == Outcome.FAIL
    assert "SIGSEGV" in verdict.headline
    assert "faulty.py" in verdict.checks[0].sentence  # the Python frame that faulthandler printed


def test_kill_that_nobody_planned_stays_unexplained(run: Run) -> None:
    verdict, _ = run("tiny", "signal:9@L01.ffn.down")
    assert "killed, cause unknown" in verdict.headline


def test_speed_is_not_judged_when_the_text_is_wrong(run: Run) -> None:
    verdict, _ = run("curve", "scale:0.3@L00.attn.mix;zero-row:3@L01.ffn.add")
    assert "golden_right" in failed(verdict)


def test_budget_that_is_missed_fails_with_number_and_limit(run: Run) -> None:
    budget = {"min_tokens_per_s": 1e9, "memory_mb": 1.0}
    verdict, _ = run("curve", board={"budget": budget})
    assert {"tokens_per_s_at_end", "memory_mb"} <= failed(verdict)
    check = next(check for check in verdict.checks if check.name == "memory_mb")
    assert check.limit == 1.0
    assert isinstance(check.measured, float) and check.measured > 10
    assert "at most 1 MiB wanted" in check.sentence


def test_stress_survives_its_planned_kill_and_counts_it(run: Run) -> None:
    verdict, log = run("stress")
    details = verdict.details
    assert details["restarts"] == 1
    assert {turn["attempt"] for turn in details["turns"]} == {0, 1}
    assert details["golden_before"] == details["golden_after"]
    assert details["cancelled"] >= 1
    assert any(turn["cached_tokens"] == 96 for turn in details["turns"])
    assert details["leak"] == "too short to tell"
    assert len(log.exits) == 2


def test_stress_finds_answers_that_change_during_the_run(run: Run) -> None:
    # The golden generation at the start executes each op 16 times; the fault begins later.
    verdict, _ = run("stress", "scale:0.1@L00.attn.mix;zero-row:3@L01.ffn.add", after=60)
    assert "golden_same" in failed(verdict)
    assert verdict.details["golden_before"] != verdict.details["golden_after"]
