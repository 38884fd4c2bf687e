"""The few numbers of a run that nights are held against, beside its long details: a series of a
farm's year is read in a moment."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from harness.store.models import BuildRow, CampaignRow, NumbersRow, RunRow
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from harness.store.store import Store

# Column → where it lies in the details of a stage.
PLACES = {
    "speed_start": ("tokens_per_s_start",),  # tokens/s
    "speed_middle": ("tokens_per_s_middle",),
    "speed_end": ("tokens_per_s_end",),
    "ttft_s": ("ttft_s",),
    "rss_mb": ("rss_peak_mb",),
    "mean_kl": ("logits", "mean_kl"),
}
STAGES = ("curve", "accuracy")


class NightRow(NamedTuple):
    """One judged run of a night. `build` is the hash of the engine's sources; of a campaign that
    told none, that of its Python. `parameters` is JSON as it was written."""

    run_id: str
    campaign_id: str
    at: datetime.datetime  # when the campaign began
    board: str
    stage: str
    outcome: str
    clocks: str | None
    model_hash: str | None
    model_name: str | None
    scheme: str | None
    quant_hash: str | None
    parameters: str
    build: str
    speed_start: float | None
    speed_middle: float | None
    speed_end: float | None
    ttft_s: float | None
    rss_mb: float | None
    mean_kl: float | None


def numbers_of(details: Mapping[str, Any] | None) -> dict[str, float]:
    """Column → number, for those that the details hold."""
    found = {}
    for name, path in PLACES.items():
        value: Any = details
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def keep(session: Session, row: RunRow) -> None:
    """Replaces the numbers of a run by those of its details."""
    found = numbers_of(row.details) if row.stage in STAGES else {}
    old = session.get(NumbersRow, row.id)
    if old is not None:
        session.delete(old)
        session.flush()
    if found:
        session.add(NumbersRow(run_id=row.id, **found))


def nights(store: Store, kind: str, newest: int, board: str | None = None) -> list[NightRow]:
    """The runs with numbers of the newest campaigns of one kind, the oldest first. Runs that ended
    in trouble measured nothing and are left out."""
    campaigns = (
        sa.select(CampaignRow.id)
        .where(CampaignRow.kind == kind)
        .order_by(CampaignRow.started_at.desc(), CampaignRow.id)
        .limit(newest)
    )
    query = (
        sa.select(
            RunRow.id,
            RunRow.campaign_id,
            CampaignRow.started_at,
            RunRow.board,
            RunRow.stage,
            RunRow.outcome,
            RunRow.clocks,
            RunRow.model_hash,
            RunRow.model_name,
            RunRow.scheme,
            RunRow.quant_hash,
            sa.cast(RunRow.parameters, sa.Text),
            sa.func.coalesce(BuildRow.build, RunRow.engine_hash, ""),
            *(getattr(NumbersRow, name) for name in PLACES),
        )
        .join(NumbersRow, NumbersRow.run_id == RunRow.id)
        .join(CampaignRow, CampaignRow.id == RunRow.campaign_id)
        .outerjoin(BuildRow, BuildRow.campaign_id == RunRow.campaign_id)
        .where(
            RunRow.state == "judged",
            RunRow.outcome != Outcome.ERROR.value,
            RunRow.campaign_id.in_(campaigns),
        )
        .order_by(CampaignRow.started_at, RunRow.started_at, RunRow.attempt, RunRow.id)
    )
    if board is not None:
        query = query.where(RunRow.board == board)
    with store.database.reading() as session:
        return [NightRow._make(row) for row in session.execute(query)]
