"""What a killed harness left: which results count, which runs go on, which are cleared away."""

from __future__ import annotations

import sqlalchemy as sa

from engine.spool import EVENTS_NAME
from harness.farm.results import INTERRUPTED, StageResult
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


def unjudged(store: Store, campaign_id: str, board: str, stage: str) -> RunRow | None:
    """The campaign's newest run of this stage without a verdict."""
    rows = [row for row in store.unfinished(campaign_id, board) if row.stage == stage]
    return rows[-1] if rows else None


def collected_log(store: Store, run: RunRow) -> RunLog | None:
    """The log of a run that was collected to its end but not judged; its spool may be gone."""
    if run.state != "collected":
        return None
    folder = store.raw_folder(run.id)
    tail = EventTail(folder / EVENTS_NAME, run.id)
    if not tail.ended:
        return None
    end = tail.events[-1].data
    return RunLog(run.id, tail.events, folder, str(end.get("status")), str(end.get("reason") or ""))


def orphans(store: Store, board: str, *, keep: str | None) -> list[RunRow]:
    """Runs on `board` without a verdict that nobody will collect: their harness is dead or gave
    the campaign up. Those of campaign `keep` are not."""
    query = (
        sa.select(RunRow, CampaignRow)
        .join(CampaignRow, CampaignRow.id == RunRow.campaign_id)
        .where(RunRow.board == board, RunRow.state != "judged")
        .order_by(RunRow.started_at)
    )
    with store.database.reading() as session:
        found = [(run, campaign) for run, campaign in session.execute(query)]
    return [
        run
        for run, campaign in found
        if campaign.id != keep and (campaign.finished_at is not None or is_dead(campaign.owner))
    ]


def was_stopped(store: Store, campaign_id: str) -> bool:
    """Whether the user stopped the campaign, in contrast to a harness that was killed."""
    return any(row.error_kind == INTERRUPTED for row in store.campaign_runs(campaign_id))


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
