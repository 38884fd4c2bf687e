"""What a run's log shows a search, and how it is told from another failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.records import Event
from harness.bisect.hunted import Pace, Shown, hunted, shown_of, signature_of
from harness.bisect.pytest_trials import judged
from harness.bisect.session import is_test, verdict_of
from harness.bisect.trials import Result, Trial
from harness.boards.facts import Facts
from harness.errors import BoardError, HarnessError
from harness.jobs.base import StageContext
from harness.jobs.runlog import RunLog
from harness.verdicts import Check, Outcome, Verdict


def log_of(*events: tuple[str, dict[str, Any]], status: str = "finished") -> RunLog:
    made = [Event(n, n * 10**9, kind, data) for n, (kind, data) in enumerate(events)]
    return RunLog("r", made, Path("nowhere"), status, "")


def board() -> StageContext:
    facts = Facts(machine="x86_64", kernel="6.1")
    found = SimpleNamespace(board=SimpleNamespace(name="one", virtual=True), facts=facts)
    return cast("StageContext", found)


def shown(what: str, log: RunLog) -> Shown:
    return hunted(what).show(board(), log)


@pytest.mark.parametrize(
    ("log", "signature"),
    [
        (
            log_of(("error", {"kind": "NonFinite", "message": "…", "op": "L07.ffn.down"}),
                   status="failed"),
            "NonFinite in ffn.down",
        ),
        (
            log_of(("error", {"kind": "ValueError", "message": "axis 3",
                              "raised_at": ["worker.py:9 run", "decode.py:214 step"]}),
                   status="failed"),
            "ValueError in decode.py step",
        ),
        (
            log_of(("engine-exit", {"attempt": 0, "signal": "SIGSEGV"}), status="failed"),
            "SIGSEGV",
        ),
        (log_of(("engine-exit", {"attempt": 0, "code": 3}), status="failed"), "exit code 3"),
        (log_of(status="hung"), "hangs"),
    ],
)  # fmt: skip
def test_a_failure_has_one_signature_in_every_revision(log: RunLog, signature: str) -> None:
    found = shown("crash", log)
    assert found.result is Result.FAIL
    assert found.signature == signature_of(log) == signature


def test_a_run_that_came_to_its_end_is_no_crash() -> None:
    assert shown("crash", log_of()).result is Result.PASS


def test_an_engine_that_cannot_be_imported_is_no_crash_but_cannot_be_tested() -> None:
    log = log_of(("error", {"kind": "ImportError", "message": "no name x"}), status="failed")
    found = shown("crash", log)
    assert found.result is Result.OTHER
    assert found.untestable is not None
    assert "ImportError" in found.untestable


def test_a_board_that_was_lost_is_raised_and_blames_nobody() -> None:
    with pytest.raises(BoardError):
        shown("crash", log_of(status="board-lost"))


def test_the_signature_of_wrong_results_is_the_op_without_its_layer() -> None:
    check = Check(
        name="ops_local", outcome=Outcome.FAIL, measured=1, limit=0, sentence="One is wrong."
    )
    verdict = Verdict(
        outcome=Outcome.FAIL, headline="wrong", checks=(check,), culprit="L01.attn.qkv"
    )
    assert shown_of(verdict).signature == "attn.qkv"
    unnamed = verdict.model_copy(update={"culprit": None})
    assert shown_of(unnamed).signature == "ops_local"
    assert shown_of(verdict.model_copy(update={"outcome": Outcome.WARN})).result is Result.PASS
    assert shown_of(verdict.model_copy(update={"outcome": Outcome.INVALID})).result is Result.OTHER


def test_the_time_of_a_token_is_taken_from_all_generations_but_the_first() -> None:
    def case(step: float) -> list[dict[str, Any]]:
        return [{"tokens": [1, 2, 3], "times_s": [0.5, 0.5 + step, 0.5 + 2 * step]}]

    log = log_of(*(("data", {"name": "case", "value": case(step)}) for step in (9.0, 0.02, 0.03)))
    found = shown("tpot", log)
    assert found.values == pytest.approx((0.02, 0.03))
    assert found.result is Result.PASS
    assert shown("tpot", log_of()).untestable


def test_the_peak_of_memory_is_what_the_board_counted() -> None:
    log = log_of(("engine-exit", {"attempt": 0, "code": 0, "rusage": {"max_rss_mb": 81.5}}))
    assert shown("rss", log).values == (81.5,)
    assert shown("rss", log_of()).untestable


def test_only_known_kinds_and_tests_can_be_hunted() -> None:
    with pytest.raises(HarnessError, match="crash, accuracy, tpot, rss, or a test"):
        hunted("speed")
    assert is_test("tests/test_x.py::test_y")
    assert not is_test("crash")


def record(**fields: Any) -> dict[str, Any]:
    usual = {"test": "test_y", "when": "call", "outcome": "passed", "error": None,
             "message": None, "trouble": None}  # fmt: skip
    return {**usual, **fields}


def test_a_failing_test_is_told_from_a_board_in_the_way() -> None:
    failed = record(outcome="failed", error="DecodeFailed", message="…")
    assert judged([record()])[0] is Result.PASS
    assert judged([failed])[:2] == (Result.FAIL, "test_y: DecodeFailed")
    assert judged([record(outcome="failed", trouble="board-lost")])[0] is Result.INFRA
    assert judged([record(outcome="failed", when="setup", message="no lease")])[0] is Result.INFRA
    assert judged([failed, record(outcome="failed", when="teardown")])[0] is Result.INFRA
    result, _, why = judged([record(outcome="failed", when="setup", trouble="deploy")])
    assert result is Result.OTHER
    assert why is not None
    assert judged([record(outcome="skipped", message="needs a board")])[2] is not None


def test_a_measurement_of_what_is_checked_out_is_bad_above_its_limit() -> None:
    trial = Trial("this", {}, Result.PASS, value=0.021)
    assert verdict_of(trial, 0.022) is Result.PASS
    assert verdict_of(trial, 0.020) is Result.FAIL
    assert verdict_of(Trial("this", {}, Result.FAIL), None) is Result.FAIL
    cannot = Trial("this", {}, Result.OTHER, evidence={"untestable": "does not build"})
    assert verdict_of(cannot, 0.02) is Result.OTHER


@pytest.mark.parametrize(
    ("asked", "tpot_s", "count"),
    [(None, 0.0025, 25), (None, 0.2, 5), (None, 0.0001, 50), (3, 0.0025, 3)],
)
def test_a_visit_times_as_many_generations_as_take_two_seconds(
    asked: int | None, tpot_s: float, count: int
) -> None:
    pace = Pace(asked, tokens=32)
    assert pace.count == (asked or 5)
    pace.heard(Shown(Result.OTHER, "no token was timed"))
    assert pace.count == (asked or 5)
    pace.heard(Shown(Result.PASS, values=(tpot_s, tpot_s, 9.0)))
    assert pace.count == count
