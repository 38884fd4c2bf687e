"""The newest runs of each cell (board, model, stage), found without reading all of a long history.

Only the index on board, model, stage and time is walked: rows hold long details, and one of a
stage that is measured every night is one of hundreds.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from harness.store.models import RunRow


def cells() -> sa.Subquery:
    """Every board, model_hash and stage of which there are runs."""
    return sa.select(RunRow.board, RunRow.model_hash, RunRow.stage).distinct().subquery("cells")


def newest(count: int) -> sa.Select[str]:
    """Ids of the `count` newest runs of each cell, and those that began at the same moment as the
    last of them."""
    query = sa.select(RunRow.id).where(_among_newest(count, cells()))
    return query.correlate(None)  # inside of a query of runs it is still one of its own


def parts_of_newest(count: int) -> sa.Subquery:
    """(campaign_id, board) of the `count` newest runs of each cell, each pair once."""
    query = sa.select(RunRow.campaign_id, RunRow.board).where(_among_newest(count, cells()))
    return query.distinct().subquery("parts")


def _among_newest(count: int, cell: sa.Subquery) -> sa.ColumnElement[bool]:
    """Joins the runs of each cell that are not older than its `count`-th newest."""
    other = aliased(RunRow)
    last = (
        sa.select(other.started_at)
        .where(
            other.board == cell.c.board,
            other.model_hash.is_not_distinct_from(cell.c.model_hash),
            other.stage == cell.c.stage,
        )
        .order_by(other.started_at.desc())
        .limit(1)
        .offset(count - 1)
        .correlate(cell)
        .scalar_subquery()
    )
    oldest = (
        sa.select(sa.func.min(other.started_at))
        .where(
            other.board == cell.c.board,
            other.model_hash.is_not_distinct_from(cell.c.model_hash),
            other.stage == cell.c.stage,
        )
        .correlate(cell)
        .scalar_subquery()
    )
    return sa.and_(
        RunRow.board == cell.c.board,
        RunRow.model_hash.is_not_distinct_from(cell.c.model_hash),
        RunRow.stage == cell.c.stage,
        RunRow.started_at >= sa.func.coalesce(last, oldest),
    )
