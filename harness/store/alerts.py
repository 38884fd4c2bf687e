"""The alert ledger: every suspect of a night, how it was decided, and whether that was right."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from typing import TYPE_CHECKING

import sqlalchemy as sa

from harness.errors import HarnessError
from harness.statistics.nights import Record, ledger
from harness.store.models import AlertRow, BuildRow

if TYPE_CHECKING:
    from harness.store.store import Store


@dataclasses.dataclass(frozen=True)
class Alert:
    """See AlertRow. Values are in the metric's unit; `shift` is now over before, minus 1, positive
    is worse."""

    detector: str
    board: str
    stage: str
    metric: str
    series: str
    campaign_id: str
    run_id: str
    night: datetime.datetime
    before: float | None
    now: float | None
    shift: float | None
    p: float | None
    nights: int
    good_build: str | None
    build: str | None
    decided: str
    told: str
    search_id: str | None = None
    right: bool | None = None
    id: str = ""


class Alerts:
    """The ledger of one store."""

    def __init__(self, store: Store) -> None:
        self._database = store.database

    def add(self, alert: Alert) -> str:
        """Keeps it; returns its id."""
        name = alert.id or str(uuid.uuid4())
        with self._database.writing() as session:
            session.add(AlertRow(**{**dataclasses.asdict(alert), "id": name}))
        return name

    def all(self, board: str | None = None, campaign: str | None = None) -> list[Alert]:
        """The oldest first."""
        query = sa.select(AlertRow).order_by(AlertRow.night, AlertRow.id)
        if board is not None:
            query = query.where(AlertRow.board == board)
        if campaign is not None:
            query = query.where(AlertRow.campaign_id == campaign)
        names = [field.name for field in dataclasses.fields(Alert)]
        with self._database.reading() as session:
            rows = session.scalars(query).all()
            return [Alert(**{name: getattr(row, name) for name in names}) for row in rows]

    def settle(self, text: str, right: bool) -> Alert:
        """What a person says of the one whose id begins with `text`. Raises HarnessError if there
        is none, or more than one."""
        query = sa.select(AlertRow).where(AlertRow.id.startswith(text, autoescape=True)).limit(2)
        with self._database.writing() as session:
            rows = session.scalars(query).all()
            if len(rows) != 1 or not text:
                raise HarnessError(
                    f"{len(rows) or 'no'} alert{'s begin' if len(rows) > 1 else ' begins'} with "
                    f"{text!r}",
                    remedy="`harness results alerts` lists them",
                )
            rows[0].right = right
            name = rows[0].id
        return next(alert for alert in self.all() if alert.id == name)

    def records(self, board: str | None = None) -> list[Record]:
        """How often each detector was right."""
        return ledger([(alert.detector, alert.right) for alert in self.all(board)])

    def record_build(self, campaign: str, build: str) -> None:
        """Which engine a campaign runs."""
        with self._database.writing() as session:
            session.merge(BuildRow(campaign_id=campaign, build=build))
