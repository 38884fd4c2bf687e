"""From the store to the records of searches; the part of `dashboards.reading` that knows them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from dashboards.searches import Search, Trial
from harness.store.models import SearchRow, TrialRow
from harness.store.owner import is_dead

KEPT = 40  # of the newest searches have a page
MOST_TRIALS = 4000  # of one search are shown: the first ones


def stamp(session: Session) -> tuple[object, ...]:
    """Changes whenever a search begins, ends or makes a trial."""
    searches = session.execute(
        sa.select(sa.func.count(), sa.func.max(SearchRow.finished_at)).select_from(SearchRow)
    ).one()
    trials = session.scalar(sa.select(sa.func.count()).select_from(TrialRow))
    return (*searches, trials)


def load(session: Session) -> tuple[Search, ...]:
    """The newest searches first, with their trials."""
    query = sa.select(SearchRow).order_by(SearchRow.started_at.desc(), SearchRow.id).limit(KEPT)
    return tuple(_search(session, row) for row in session.scalars(query).all())


def _search(session: Session, row: SearchRow) -> Search:
    mine = TrialRow.search_id == row.id
    count = session.scalar(sa.select(sa.func.count()).select_from(TrialRow).where(mine)) or 0
    query = sa.select(TrialRow).where(mine).order_by(TrialRow.position).limit(MOST_TRIALS)
    return Search(
        row.id,
        row.kind,
        row.board,
        shlex.join(row.command or ()),
        row.outcome,
        row.headline or "",
        tuple(map(str, row.culprits or ())),
        row.confidence,
        row.details or {},
        row.started_at,
        row.finished_at,
        row.finished_at is not None or is_dead(row.owner),
        tuple(_trial(number, one) for number, one in enumerate(session.scalars(query), 1)),
        count,
    )


def _trial(number: int, row: TrialRow) -> Trial:
    subject = row.subject if isinstance(row.subject, Mapping) else {}
    return Trial(
        number, row.phase, subject, row.result, row.signature or "", row.value, row.seconds
    )
