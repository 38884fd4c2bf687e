"""The canary: a health check before and after a long job.

What it finds afterwards is about the board: the commit that was measured is not blamed for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.boards.care import HEALTH as HEALTH_EVENT
from harness.farm.results import StageResult
from harness.jobs.health import HEALTH
from harness.verdicts import Outcome, Verdict, one_line

if TYPE_CHECKING:
    from harness.farm.board import BoardRun
    from harness.jobs.base import Stage

LONG_MINUTES = 2.0  # a shorter stress stage is not worth the seconds


def is_wanted(run: BoardRun, stage: Stage) -> bool:
    """Whether the stage is long enough on this board."""
    minutes = run.orders.options.stress_minutes or run.board.stress_minutes
    return stage.name == "stress" and minutes >= LONG_MINUTES


def before(run: BoardRun, stage: Stage) -> StageResult | None:
    """None when the board is well; else the stage's result, which is not begun.

    Nothing is known of the board yet, so wrong tokens may be the engine's as well: the board is
    not set aside for them. Raises Interrupted.
    """
    found = _check(run)
    if found.outcome.lets_next_stage_run:
        return None
    if found.outcome is Outcome.ERROR:
        verdict = found.verdict
    else:
        verdict = Verdict(
            outcome=Outcome.BLOCKED,
            headline=one_line(f"blocked by {HEALTH.name}: {found.verdict.headline}"),
            remedy=found.verdict.remedy,
        )
    run_id = run.begin_run(stage)
    run.store.finish_run(run_id, verdict, error_kind=found.error_kind)
    return StageResult(
        run.board.name, stage.name, verdict, run_id, attempts=0, error_kind=found.error_kind
    )


def after(run: BoardRun, stage: Stage, result: StageResult) -> StageResult:
    """The stage's result, which is not judged where the board turned out to be sick.

    Such a board is set aside. Raises Interrupted.
    """
    if result.outcome is Outcome.ERROR or run.stopping():
        return result  # what ails the board is known
    found = _check(run)
    if found.outcome is not Outcome.FAIL:
        return result
    reason = f"it failed a health check after {stage.name}: {found.verdict.headline}"
    run.campaign.care.quarantine(run.board.name, reason)
    run.campaign.reporter.note(f"{run.board.name}: {reason}; it is set aside")
    if result.outcome is not Outcome.FAIL or result.run_id is None:
        return result
    verdict = result.verdict.model_copy(
        update={
            "outcome": Outcome.INVALID,
            "headline": one_line(f"the board is sick, so not judged: {result.verdict.headline}"),
            "remedy": f"see `harness boards why {run.board.name}`; measure on another board",
            "culprit": None,
        }
    )
    run.store.finish_run(result.run_id, verdict)
    return StageResult(result.board, result.stage, verdict, result.run_id, attempts=result.attempts)


def record(run: BoardRun, result: StageResult) -> None:
    """A health check's result, for the board's journal."""
    good = result.outcome.lets_next_stage_run
    told = f"{result.outcome.value}: {result.verdict.headline}"
    run.campaign.care.note(run.board.name, HEALTH_EVENT, good, told)


def _check(run: BoardRun) -> StageResult:
    from harness.farm.stage import StageRun

    return StageRun(run, HEALTH).anew()
