"""Boards that are set aside, and the journal of what was done about boards; in the results store.

A board in quarantine takes part in nothing until a health check passes or a person releases it:
one wedged board must not cost every campaign its full deadlines again.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING

import sqlalchemy as sa

from harness.errors import BoardError
from harness.store.models import BoardEventRow, BoardRow, QuarantineRow
from harness.store.owner import Owner, current_owner

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from harness.store import Store

# What is journalled.
REBOOT, POWER, HEALTH = "reboot", "power", "health"
QUARANTINE, RELEASE = "quarantine", "release"
EVENT = "event"  # declared by a person: from here on the board's numbers are new ones
HARNESS = "the harness"


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """`automatic`: set by the harness. Times are for people."""

    board: str
    reason: str
    by: str
    automatic: bool
    since: datetime.datetime

    def __str__(self) -> str:
        since = self.since.astimezone().strftime("%Y-%m-%d %H:%M")
        return f"quarantined since {since} by {self.by}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class BoardEvent:
    """One line of a board's journal."""

    kind: str
    good: bool
    told: str
    at: datetime.datetime


def this_person() -> str:
    """Who runs this process, as `user@host`."""
    owner = Owner.parse(current_owner())
    return f"{owner.user}@{owner.host}" if owner else "somebody"


class Care:
    """Quarantine and journal of all boards of one store."""

    def __init__(self, store: Store) -> None:
        self._database = store.database

    def quarantine(self, board: str, reason: str, by: str = HARNESS) -> Quarantine:
        """Sets the board aside. One that is already keeps its first reason, unless a person gives
        another."""
        automatic = by == HARNESS
        with self._database.writing() as session:
            row = session.get(QuarantineRow, board)
            if row is not None and automatic:
                return _quarantine(row)
            row = row or QuarantineRow(board=board, since=_now())
            row.reason, row.set_by, row.automatic = reason, by, automatic
            session.add(row)
            self._note(session, board, QUARANTINE, False, f"by {by}: {reason}")
            session.flush()
            return _quarantine(row)

    def release(self, board: str, why: str) -> Quarantine | None:
        """Re-admits the board; returns what it was set aside for, None for one that was not."""
        with self._database.writing() as session:
            row = session.get(QuarantineRow, board)
            if row is None:
                return None
            was = _quarantine(row)
            session.delete(row)
            self._note(session, board, RELEASE, True, why)
            return was

    def quarantined(self, board: str) -> Quarantine | None:
        with self._database.reading() as session:
            row = session.get(QuarantineRow, board)
            return None if row is None else _quarantine(row)

    def require_admitted(self, board: str) -> None:
        """Raises BoardError "quarantined", with the reason, for a board that is set aside."""
        found = self.quarantined(board)
        if found is not None:
            raise BoardError(
                board,
                "quarantined",
                str(found),
                remedy=f"mend it, then run `harness boards health {board}`, which re-admits it",
            )

    def note(self, board: str, kind: str, good: bool, told: str) -> None:
        """One line for the board's journal."""
        with self._database.writing() as session:
            self._note(session, board, kind, good, told)

    def events(
        self, board: str, *, kind: str | None = None, limit: int = 20
    ) -> tuple[BoardEvent, ...]:
        """The newest `limit` lines of the board's journal, the newest first."""
        query = sa.select(BoardEventRow).where(BoardEventRow.board == board)
        if kind is not None:
            query = query.where(BoardEventRow.kind == kind)
        query = query.order_by(BoardEventRow.id.desc()).limit(limit)
        with self._database.reading() as session:
            return tuple(
                BoardEvent(row.kind, row.good, row.told, row.at) for row in session.scalars(query)
            )

    def last_boot_id(self, board: str) -> str | None:
        """The boot_id that the board had when it was probed last; None where it never was."""
        with self._database.reading() as session:
            row = session.get(BoardRow, board)
            return None if row is None else row.boot_id

    @staticmethod
    def _note(session: Session, board: str, kind: str, good: bool, told: str) -> None:
        row = BoardEventRow(board=board, at=_now(), kind=kind, good=good, told=told)
        session.add(row)


def _quarantine(row: QuarantineRow) -> Quarantine:
    return Quarantine(row.board, row.reason, row.set_by, row.automatic, row.since)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
