"""From the store to what pages show of nights and boards; a part of `dashboards.reading`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from dashboards.nights import Happening, Health, Nights
from harness.boards.care import HEALTH, Care
from harness.boards.leases import Leases
from harness.farm.series import Series, all_series, growth
from harness.store import Store
from harness.store.alerts import Alert, Alerts
from harness.store.models import AlertRow, BoardEventRow, BoardRow, LeaseRow, QuarantineRow

SHOWN_NIGHTS = 180  # the newest; older ones stay in the store
FEWEST_NIGHTS = 60  # of a large farm, whose site has to be built in seconds too
MOST_BOARD_NIGHTS = 10_000
JOURNAL = 60  # lines of one board
ALERTS = 40


def stamp(session: Session) -> tuple[object, ...]:
    """Changes with a board's journal, ledger, lease or quarantine."""
    counted = [
        session.execute(sa.select(sa.func.count(), sa.func.max(column))).one()
        for column in (BoardEventRow.id, QuarantineRow.since, LeaseRow.acquired_at,
                       LeaseRow.released_at)
    ]  # fmt: skip
    alerts = session.execute(
        sa.select(AlertRow.right, sa.func.count()).group_by(AlertRow.right)
    ).all()
    return (*(tuple(row) for row in counted), *sorted(map(str, alerts)))


def load(store: Store) -> Nights:
    """Every board that the store knows, by name, with its series."""
    found = outline(store)
    shown = MOST_BOARD_NIGHTS // max(len(found.health), 1)
    series: dict[str, list[Series]] = {}
    for one in all_series(store, newest=min(SHOWN_NIGHTS, max(FEWEST_NIGHTS, shown))):
        series.setdefault(one.key.board, []).append(one)
    health = tuple(_with(one, series.get(one.board, ())) for one in found.health)
    return dataclasses.replace(found, health=health)


def with_series(store: Store, health: Health) -> Health:
    """One board of `outline`, with its series."""
    return _with(health, all_series(store, board=health.board, newest=SHOWN_NIGHTS))


def _with(health: Health, series: Sequence[Series]) -> Health:
    return dataclasses.replace(health, series=tuple(series), noise=growth(series))


def outline(store: Store) -> Nights:
    """Every board that the store knows, by name, without its series."""
    ledger = Alerts(store)
    alerts: dict[str, list[Alert]] = {}
    for alert in ledger.all():
        alerts.setdefault(alert.board, []).append(alert)
    care = Care(store)
    held = {holder.board: holder for holder in Leases(store).held()}
    with store.database.reading() as session:
        rows = session.scalars(sa.select(BoardRow).order_by(BoardRow.name)).all()
        # Asked first: of most boards of a large farm there is nothing to read.
        out_of_use = set(session.scalars(sa.select(QuarantineRow.board)))
        told_of = set(session.scalars(sa.select(BoardEventRow.board).distinct()))
    found = []
    for row in rows:
        events = care.events(row.name, limit=JOURNAL) if row.name in told_of else ()
        journal = tuple(Happening(e.kind, e.good, e.told, e.at) for e in events)
        holder = held.get(row.name)
        aside = care.quarantined(row.name) if row.name in out_of_use else None
        found.append(
            Health(
                row.name,
                bool(row.virtual),
                row.last_seen,
                f"{holder.owner}: {holder.reason}" if holder is not None else "",
                str(aside) if aside is not None else "",
                journal,
                next((line for line in journal if line.kind == HEALTH), None),
                (),
                growth(()),
                tuple(reversed(alerts.get(row.name, [])[-ALERTS:])),
            )
        )
    return Nights(tuple(found), tuple(ledger.records()))
