"""Runs that did not end well: what the log proves is said, and nothing more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from engine.measure.memory import Limits, Need, OverBudget
from harness.errors import BoardError
from harness.jobs.base import StageContext
from harness.jobs.failures import judge_failure
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]


def judged(context: StageContext, log: object) -> Verdict:
    verdict = judge_failure(context, log, "curve")  # type: ignore[arg-type]
    assert verdict is not None
    return verdict


def test_finished_run_is_left_to_its_stage(build: LogBuilder, stage_context: Contexts) -> None:
    assert judge_failure(stage_context(), build.started().ended(), "curve") is None


def test_segfault_is_named_with_what_the_engine_said_last(
    build: LogBuilder, stage_context: Contexts
) -> None:
    build.folder.mkdir()
    (build.folder / "engine.0.log").write_text(
        "noise\n" * 50 + 'Fatal Python error: Segmentation fault\n  File "packed.py", line 9\n'
    )
    log = build.started().ended("failed", code=None, signal="SIGSEGV")
    verdict = judged(stage_context(), log)
    assert verdict.outcome == Outcome.FAIL
    assert "SIGSEGV" in verdict.headline
    assert "Segmentation fault" in verdict.checks[0].sentence
    assert verdict.culprit is None


def test_an_engine_that_the_supervisor_ended_is_told_with_the_supervisors_reason(
    build: LogBuilder, stage_context: Contexts
) -> None:
    log = build.started().ended("failed", code=None, signal="SIGTERM", ended_by="supervisor")
    log = dataclasses.replace(log, reason="the engine said more than 256 MB of events")
    with pytest.raises(BoardError, match="more than 256 MB of events") as caught:
        judge_failure(stage_context(), log, "curve")
    assert "something else" not in str(caught.value)


def test_sigkill_without_evidence_is_never_called_out_of_memory(
    build: LogBuilder, stage_context: Contexts
) -> None:
    build.started()
    for second, rss in enumerate((200.0, 900.0, 1800.0)):
        build.add("sample", second, rss_mb=rss, mem_available_mb=2000 - rss)
    verdict = judged(stage_context(), build.ended("failed", code=None, signal="SIGKILL"))
    assert "killed, cause unknown" in verdict.headline
    assert "200 to 1800 MB" in verdict.checks[0].sentence  # the trend stands beside it
    assert "oom" not in verdict.model_dump_json().lower()
    assert "out of memory" not in verdict.model_dump_json().lower()


def test_kernel_record_of_a_kill_is_quoted(build: LogBuilder, stage_context: Contexts) -> None:
    log = build.started().ended("failed", code=None, signal="SIGKILL", oom_kills=1)
    assert "1 kill(s) for want of memory" in judged(stage_context(), log).headline


def test_bad_numbers_name_the_op_as_culprit(build: LogBuilder, stage_context: Contexts) -> None:
    build.started().add(
        "error", kind="NonFinite", message="step 3, op L03.attn.out: 1 of 576 values are NaN",
        step=3, layer=3, op="L03.attn.out",
    )  # fmt: skip
    verdict = judged(stage_context(), build.ended("failed", code=1))
    assert (verdict.outcome, verdict.culprit) == (Outcome.FAIL, "L03.attn.out")
    assert "step 3" in verdict.headline


@pytest.mark.parametrize("kind", ["PackageError", "ModuleNotFoundError", "OSError"])
def test_broken_deployment_is_an_error_not_a_finding(
    kind: str, build: LogBuilder, stage_context: Contexts
) -> None:
    build.started().add("error", kind=kind, message="model.pkg: cannot be opened")
    verdict = judged(stage_context(), build.ended("failed", code=1))
    assert verdict.outcome == Outcome.ERROR
    assert verdict.remedy


def test_hang_fails_and_tells_the_last_progress(build: LogBuilder, stage_context: Contexts) -> None:
    build.started().add("progress", 7.0, done=3, total=9, message="sweep 2, length 512")
    log = build.ended("deadline", "not done after 60 s", code=None, signal="SIGTERM")
    verdict = judged(stage_context(), log)
    assert verdict.outcome == Outcome.FAIL
    assert "sweep 2, length 512" in verdict.headline
    assert "hangs" in verdict.headline
    assert "SIGTERM" not in verdict.headline  # the supervisor's own signal is no crash


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (range(2, 100, 7), Outcome.INVALID),  # steady to the end
        ([5, 45, 88], Outcome.INVALID),  # slow steps, but it goes on
        ([1, 50], Outcome.INVALID),  # a pause like the one before
        ([1, 2, 3, 60], Outcome.INVALID),
        ([1, 2, 3, 20], Outcome.FAIL),  # silent for much longer than ever
        ([], Outcome.FAIL),
    ],
)
def test_slow_board_is_told_from_a_hanging_engine(
    words: Iterable[int], outcome: Outcome, build: LogBuilder, stage_context: Contexts
) -> None:
    build.started()
    for second in words:
        build.add("progress", float(second), done=second, total=99, message="filling the cache")
    log = build.ended("deadline", "not done after 100 s", code=None, signal="SIGTERM")
    verdict = judged(stage_context(), log)
    assert verdict.outcome == outcome
    if outcome == Outcome.INVALID:
        assert "too slow for the time given" in verdict.headline
        assert verdict.remedy is not None and "--curve-seconds" in verdict.remedy


@pytest.mark.parametrize(
    ("status", "kind"), [("lost", "board-lost"), ("board-reset", "board-reset")]
)
def test_trouble_of_the_board_is_raised_not_judged(
    status: str, kind: str, build: LogBuilder, stage_context: Contexts
) -> None:
    with pytest.raises(BoardError) as caught:
        judge_failure(stage_context(), build.started().log(status, "gone"), "curve")
    assert caught.value.kind == kind


STACKS = """process 9, 2 threads
thread 9 (python3): state S, 0.00 of 0.30 s on a CPU, waits in futex_wait_queue
thread 10 (dn-team): state R, 0.30 of 0.30 s on a CPU
Thread 0x00007f01 (most recent call first):
  File "/board/parts/ab/engine/runtime/queues.py", line 90 in _serve
  File "/usr/lib/python3.9/threading.py", line 980 in run

Current thread 0x00007f02 (most recent call first):
  File "/board/parts/ab/engine/runtime/queues.py", line 44 in wait
  File "/board/parts/ab/engine/decode.py", line 120 in advance
"""


def test_a_hung_engine_is_a_finding_with_the_place_where_it_stood(
    build: LogBuilder, stage_context: Contexts
) -> None:
    build.started().add("progress", 7.0, done=3, total=9, message="sweep 2, length 512")
    build.add("log", 97.0, attempt=0, message="silent", stacks=STACKS)
    log = build.ended("hung", "no sign of progress for 90 s", code=None, signal="SIGTERM")
    verdict = judged(stage_context(), log)
    assert verdict.outcome == Outcome.FAIL
    assert "the engine hangs in queues.py:44 wait: silent for 93 s" in verdict.headline
    (check,) = verdict.checks
    assert (check.name, check.measured) == ("makes_progress", "hung")
    assert "futex_wait_queue" in check.sentence
    assert "line 90 in _serve" in check.sentence
    assert "--stall-seconds" in (verdict.remedy or "")


def test_a_hung_engine_without_python_frames_is_told_by_what_the_kernel_says(
    build: LogBuilder, stage_context: Contexts
) -> None:
    text = "process 9, 1 threads\nthread 9 (python3): state D, waits in rknpu_wait\n"
    build.started().add("log", 97.0, attempt=0, message="silent", stacks=text)
    log = build.ended("hung", "no sign of progress for 90 s", code=None, signal="SIGKILL")
    verdict = judged(stage_context(), log)
    assert "the engine hangs: silent for" in verdict.headline
    assert "rknpu_wait" in verdict.checks[0].sentence


def test_planned_kill_is_no_crash(build: LogBuilder, stage_context: Contexts) -> None:
    build.started().add("engine-exit", 30.0, attempt=0, planned=True, signal="SIGKILL")
    assert judge_failure(stage_context(), build.ended(), "stress") is None


def test_exit_code_without_an_error_is_a_finding(
    build: LogBuilder, stage_context: Contexts
) -> None:
    verdict = judged(stage_context(), build.started().ended("failed", code=3))
    assert verdict.outcome == Outcome.FAIL
    assert "exit code 3" in verdict.headline


def test_frames_of_a_traceback_are_evidence_and_no_remedy(
    build: LogBuilder, stage_context: Contexts
) -> None:
    build.started().add(
        "error", kind="ValueError", message="no", raised_at=["packed.py:9 f", "packed.py:12 g"]
    )
    verdict = judged(stage_context(), build.ended("failed", code=1))
    assert verdict.remedy == "read the engine's log; raised at packed.py:9 f; packed.py:12 g"


def test_a_model_that_the_engine_refused_on_the_board_is_a_finding_with_its_table(
    build: LogBuilder, stage_context: Callable[..., StageContext]
) -> None:
    need = Need(700, 256, 40, 44, 8192, "f16")
    message = str(OverBudget(need, Limits(memory=946, reserve=76)))
    log = build.started().add("error", 1.0, kind="OverBudget", message=message).ended("failed")
    verdict = judge_failure(stage_context(), log, "curve")
    assert verdict is not None
    assert verdict.outcome == Outcome.FAIL
    assert "refused before loading: the model needs 1040 MiB" in verdict.headline
    assert "KV cache, 8192 positions, f16" in verdict.checks[0].sentence


def test_a_board_whose_memory_others_use_is_trouble(
    build: LogBuilder, stage_context: Callable[..., StageContext]
) -> None:
    message = str(OverBudget(Need(700, 256, 40, 44, 8192, "f16"), Limits(available=500)))
    log = build.started().add("error", 1.0, kind="OverBudget", message=message).ended("failed")
    with pytest.raises(BoardError) as caught:
        judge_failure(stage_context(), log, "curve")
    assert caught.value.kind == "low-memory"
