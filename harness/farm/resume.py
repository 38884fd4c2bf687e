"""What a killed harness left: which results count, which runs go on, which are cleared away."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from engine.spool import EVENTS_NAME
from harness.farm.results import ABANDONED, StageResult
from harness.jobs.runlog import EventTail, RunLog
from harness.store import CampaignRow, RunRow, Store, is_dead
from harness.verdicts import Check, Outcome, Verdict

# A verdict about the product is kept; trouble, and what never ran, is tried again.
KEPT = (Outcome.PASS, Outcome.WARN, Outcome.FAIL, Outcome.INVALID)


def judged(
    store: Store, campaign_id: str, board: str, stage: str, engine_hash: str
) -> StageResult | None:
    """The stage's result from before the harness was killed, if there is one that counts: a
    verdict about this very engine."""
    rows = [
        row
        for row in store.campaign_runs(campaign_id, board)
        if row.stage == stage and row.state == "judged"
    ]
    if not rows:
        return None
    last = rows[-1]
    if last.engine_hash != engine_hash or last.error_kind is not None:
        return None
    if Outcome(last.outcome or "error") not in KEPT:
        return None
    return StageResult(board, stage, verdict_of(last), last.id, attempts=last.attempt, reused=True)


def unjudged(
    store: Store, campaign_id: str, board: str, stage: str, engine_hash: str
) -> RunRow | None:
    """The campaign's newest run of this stage without a verdict, if it is one of this engine."""
    rows = [row for row in store.unfinished(campaign_id, board) if row.stage == stage]
    return rows[-1] if rows and rows[-1].engine_hash == engine_hash else None


def continued(
    store: Store, campaign_id: str, board: str, stages: Sequence[str], engine_hash: str
) -> RunRow | None:
    """The one run that a resumed campaign goes on with: that of its first stage without a verdict
    that counts."""
    for stage in stages:
        done = judged(store, campaign_id, board, stage, engine_hash)
        if done is None:
            return unjudged(store, campaign_id, board, stage, engine_hash)
        if not done.outcome.lets_next_stage_run:
            return None
    return None


def collected_log(store: Store, run: RunRow, engine_hash: str) -> RunLog | None:
    """The log of a run of this engine that was collected to its end but not judged; its spool may
    be gone."""
    if run.state != "collected" or run.engine_hash != engine_hash:
        return None
    folder = store.raw_folder(run.id)
    tail = EventTail(folder / EVENTS_NAME, run.id)
    if not tail.ended:
        return None
    end = tail.events[-1].data
    return RunLog(run.id, tail.events, folder, str(end.get("status")), str(end.get("reason") or ""))


def orphans(
    store: Store, board: str, campaign_id: str | None = None, *, keep: str | None = None
) -> list[RunRow]:
    """Runs on `board` without a verdict that nobody will collect, the oldest first: their harness
    is dead or gave the campaign up, or they are of the asker's own campaign `campaign_id`. Run
    `keep`, which the asker goes on with, is none."""
    query = (
        sa.select(RunRow, CampaignRow)
        .join(CampaignRow, CampaignRow.id == RunRow.campaign_id)
        .where(RunRow.board == board, RunRow.state != "judged")
        .order_by(RunRow.started_at)
    )
    with store.database.reading() as session:
        found = [(run, campaign) for run, campaign in session.execute(query)]
    return [run for run, campaign in found if run.id != keep and _is_nobodys(campaign, campaign_id)]


def is_leftover(store: Store, run: RunRow, campaign_id: str | None) -> bool:
    """Whether a run that lives on a board, whose lease the asker holds, is the asker's to end: it
    was judged (its clean-up failed), or it is an orphan. `campaign_id` is the asker's own."""
    return run.state == "judged" or _is_nobodys(store.campaign(run.campaign_id), campaign_id)


def _is_nobodys(campaign: CampaignRow, campaign_id: str | None) -> bool:
    """Whether no other harness will collect the campaign's runs."""
    if campaign.id == campaign_id or campaign.finished_at is not None:
        return True
    return is_dead(campaign.owner)


def abandon(
    store: Store, run_id: str, why: str = "its harness ended, and it was not resumed"
) -> None:
    """Closes a run that nobody will judge."""
    verdict = Verdict(outcome=Outcome.INVALID, headline=f"abandoned: {why}")
    store.finish_run(run_id, verdict, error_kind=ABANDONED)


# A campaign that the user stopped has an outcome, but no end: it can be continued on request.
_STOPPED = Outcome.INVALID


def mark_stopped(store: Store, campaign_id: str, stopped: bool = True) -> None:
    """Records that the user stopped the campaign, or with False that it goes on."""
    with store.database.writing() as session:
        session.execute(
            sa.update(CampaignRow)
            .where(CampaignRow.id == campaign_id, CampaignRow.finished_at.is_(None))
            .values(outcome=_STOPPED.value if stopped else None)
        )


def was_stopped(store: Store, campaign_id: str) -> bool:
    """Whether the user stopped the campaign, in contrast to a harness that was killed."""
    row = store.campaign(campaign_id)
    return row.finished_at is None and row.outcome == _STOPPED.value


def verdict_of(row: RunRow) -> Verdict:
    """The verdict as it was stored."""
    return Verdict(
        outcome=Outcome(row.outcome or "error"),
        headline=row.headline or "",
        checks=tuple(
            Check(
                name=check.name,
                outcome=Outcome(check.outcome),
                measured=check.measured if check.measured_text is None else check.measured_text,
                limit=check.limit if check.limit_text is None else check.limit_text,
                unit=check.unit,
                sentence=check.sentence,
            )
            for check in row.checks
        ),
        culprit=row.culprit,
        remedy=row.remedy,
        details=row.details or {},
    )
