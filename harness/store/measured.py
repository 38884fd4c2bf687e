"""What was measured on a board before: its read rate, and how a model did there."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from harness.store.models import BoardRow, RunRow

if TYPE_CHECKING:
    from harness.store.store import Store

SOURCES = ("curve", "profile")  # stages that read memory as fast as they can
_BELIEVED = ("pass", "warn", "fail")  # an invalid run was disturbed
_LOOKED_AT = 20  # of the newest runs


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The newest read rate of a board."""

    gb_s: float
    stage: str
    run_id: str
    measured_at: datetime.datetime

    @property
    def words(self) -> str:
        when = self.measured_at.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"measured by {self.stage} run {self.run_id[:8]} on {when}"


def bandwidth_of(store: Store, board: str) -> Bandwidth | None:
    """None when no run of this board has measured it."""
    for row in _runs(store, board, SOURCES):
        rate = (row.details or {}).get("bandwidth_gb_s")
        if isinstance(rate, (int, float)) and rate > 0:
            return Bandwidth(float(rate), row.stage, row.id, row.started_at)
    return None


def curve_of(store: Store, board: str, model: str) -> tuple[str, Mapping[str, Any]] | None:
    """(scheme, details) of the newest latency curve of a model there."""
    for row in _runs(store, board, ("curve",)):
        if row.model_name == model and row.details and row.details.get("points"):
            return row.scheme or "", row.details
    return None


def _runs(store: Store, board: str, stages: tuple[str, ...]) -> list[RunRow]:
    """Judged runs, the newest first."""
    query = (
        sa.select(RunRow)
        .where(RunRow.board == board, RunRow.stage.in_(stages), RunRow.outcome.in_(_BELIEVED))
        .order_by(RunRow.started_at.desc(), RunRow.id)
        .limit(_LOOKED_AT)
    )
    with store.database.reading() as session:
        return list(session.scalars(query))


def facts_of(store: Store, board: str) -> Mapping[str, Any] | None:
    """What the board said of itself when it was last used; None for an unknown one."""
    with store.database.reading() as session:
        row = session.get(BoardRow, board)
        return dict(row.facts) if row is not None and row.facts else None
