"""Searches and their trials in the results store. Each trial is kept as soon as it is made."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from harness.bisect.trials import Result, Trial
from harness.errors import HarnessError
from harness.store.models import SearchRow, TrialRow
from harness.store.owner import current_owner, is_dead
from harness.store.store import options_hash

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from harness.store.store import Store


class Searches:
    """All searches of one store."""

    def __init__(self, store: Store) -> None:
        self._database = store.database

    def begin(
        self, kind: str, board: str, command: Sequence[str], options: Mapping[str, Any]
    ) -> str:
        """A new search of this process; returns its id. `options`, in plain JSON, are everything
        that decides what the search does: one with the same options may be continued."""
        row = SearchRow(
            id=str(uuid.uuid4()),
            kind=kind,
            board=board,
            command=list(command),
            options=dict(options),
            options_hash=options_hash({**options, "board": board}),
            owner=current_owner(),
            started_at=_now(),
        )
        with self._database.writing() as session:
            session.add(row)
        return row.id

    def interrupted(self, kind: str, board: str, options: Mapping[str, Any]) -> str | None:
        """The latest search with these options that has no outcome and whose process is dead or is
        this one. It belongs to this process afterwards: only one of two that ask gets it."""
        query = (
            sa.select(SearchRow)
            .where(
                SearchRow.kind == kind,
                SearchRow.options_hash == options_hash({**options, "board": board}),
                SearchRow.finished_at.is_(None),
            )
            .order_by(SearchRow.started_at.desc(), SearchRow.id)
        )
        with self._database.writing() as session:
            for row in session.scalars(query):
                if is_dead(row.owner) or row.owner == current_owner():
                    row.owner = current_owner()
                    return row.id
        return None

    def add(self, search_id: str, trial: Trial) -> None:
        """Keeps a trial behind those that are there. Raises HarnessError for an unknown search."""
        with self._database.writing() as session:
            _get(session, search_id)
            last = session.scalar(
                sa.select(sa.func.max(TrialRow.position)).where(TrialRow.search_id == search_id)
            )
            session.add(
                TrialRow(
                    search_id=search_id,
                    position=0 if last is None else last + 1,
                    phase=trial.phase,
                    subject=dict(trial.subject),
                    result=trial.result.value,
                    signature=trial.signature,
                    value=trial.value,
                    seconds=trial.seconds,
                    run=trial.run,
                    evidence=dict(trial.evidence) or None,
                )
            )

    def trials(self, search_id: str) -> list[Trial]:
        """In the order in which they were made."""
        query = sa.select(TrialRow).where(TrialRow.search_id == search_id)
        with self._database.reading() as session:
            rows = session.scalars(query.order_by(TrialRow.position)).all()
        return [
            Trial(
                phase=row.phase,
                subject=row.subject,
                result=Result(row.result),
                signature=row.signature,
                value=row.value,
                seconds=row.seconds,
                run=row.run,
                evidence=row.evidence or {},
            )
            for row in rows
        ]

    def finish(
        self,
        search_id: str,
        outcome: str,
        headline: str,
        *,
        culprits: Sequence[str] = (),
        confidence: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the outcome by its name, a sentence, and what is to blame. `confidence` is the
        probability that the name is right; `details`, in plain JSON, is what pages show."""
        with self._database.writing() as session:
            row = _get(session, search_id)
            row.outcome, row.headline, row.finished_at = outcome, headline, _now()
            row.culprits, row.confidence = list(culprits), confidence
            row.details = dict(details or {}) or None

    def get(self, search_id: str) -> SearchRow:
        """Raises HarnessError for an unknown id."""
        with self._database.reading() as session:
            return _get(session, search_id)

    def find(self, text: str) -> SearchRow:
        """The search whose id begins with `text`, or the newest for "last".

        Raises HarnessError if there is none, or more than one.
        """
        if text == "last":
            rows = self.newest(limit=1)
        else:
            query = sa.select(SearchRow).where(SearchRow.id.startswith(text, autoescape=True))
            with self._database.reading() as session:
                rows = list(session.scalars(query.limit(2)))
        if not rows or not text:
            raise _unknown(text)
        if len(rows) > 1:
            raise HarnessError(
                f"more than one search begins with {text!r}", remedy="give more of its characters"
            )
        return rows[0]

    def newest(self, kind: str | None = None, limit: int | None = None) -> list[SearchRow]:
        """The newest first; of one kind, if it is given."""
        query = sa.select(SearchRow).order_by(SearchRow.started_at.desc(), SearchRow.id)
        if kind is not None:
            query = query.where(SearchRow.kind == kind)
        with self._database.reading() as session:
            return list(session.scalars(query.limit(limit)))


def _get(session: Session, search_id: str) -> SearchRow:
    row = session.get(SearchRow, search_id)
    if row is None:
        raise _unknown(search_id)
    return row


def _unknown(search_id: str) -> HarnessError:
    return HarnessError(
        f"no search {search_id!r} in the results",
        remedy="`harness bisect list` lists what there is",
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
