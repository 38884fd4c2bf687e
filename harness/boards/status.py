"""What is known about boards without asking them: who holds one, whether it is set aside, how its
last runs ended, what was done about it."""

from __future__ import annotations

import datetime
from typing import Any

import pandas as pd
import sqlalchemy as sa

from harness.boards import virtual
from harness.boards.care import HEALTH, BoardEvent, Care, Quarantine
from harness.boards.leases import Leases
from harness.inventory import Board
from harness.paths import existing_state_dir
from harness.store import CampaignRow, RunRow, Store, is_dead
from harness.verdicts import Record

EARLIER = 4  # runs before the last that are told
JOURNAL = 8  # lines of its journal


class Ending(Record):
    """How one run ended."""

    stage: str
    outcome: str
    headline: str
    model: str
    at: datetime.datetime
    error_kind: str | None = None
    remedy: str | None = None


class Left(Record):
    """A run without an end, of a harness that ended: it may still be on the board."""

    run_id: str
    stage: str
    since: datetime.datetime
    stopped: bool  # by the user, so that only --resume continues it


class Aside(Record):
    """Why a board is in quarantine."""

    reason: str
    by: str
    since: datetime.datetime


class Happening(Record):
    """A line of a board's journal: a restart, a health check, a quarantine."""

    kind: str
    good: bool
    told: str
    at: datetime.datetime


class Status(Record):
    """`address` of a virtual board is where it listens, "stopped" when it does not run."""

    board: str
    address: str
    tags: tuple[str, ...] = ()
    holder: str | None = None  # owner of the lease in force
    reason: str | None = None
    held_since: datetime.datetime | None = None
    held_until: datetime.datetime | None = None
    last: Ending | None = None
    last_error: Ending | None = None  # infrastructure, the newest
    earlier: tuple[Ending, ...] = ()  # before `last`, the newest first
    left: tuple[Left, ...] = ()  # the oldest first
    quarantine: Aside | None = None
    last_health: Happening | None = None
    journal: tuple[Happening, ...] = ()  # but for health checks, the newest first


def status_of(boards: list[Board]) -> list[Status]:
    """One per board, in their order. Creates no results database where there is none."""
    running = {state.name: state for state in virtual.running()}
    known = (existing_state_dir() / "results.sqlite").exists()
    if not known:
        return [Status(board=b.name, address=_address(b, running), tags=b.tags) for b in boards]
    with Store.open() as store:
        return [_status(store, board, running) for board in boards]


def _status(store: Store, board: Board, running: dict[str, Any]) -> Status:
    holder, care = Leases(store).holder(board.name), Care(store)
    runs = store.frames.runs(board=board.name)
    judged = runs[runs["state"] == "judged"]
    errors = judged[judged["outcome"] == "error"]
    return Status(
        board=board.name,
        address=_address(board, running),
        tags=board.tags,
        holder=holder.owner if holder else None,
        reason=holder.reason if holder else None,
        held_since=holder.acquired_at if holder else None,
        held_until=holder.expires_at if holder else None,
        last=_ending(judged),
        last_error=_ending(errors),
        earlier=tuple(
            ending
            for count in range(1, EARLIER + 1)
            if (ending := _ending(judged.iloc[:-count])) is not None
        ),
        left=_left(store, board.name),
        quarantine=_aside(care.quarantined(board.name)),
        last_health=next(map(_happening, care.events(board.name, kind=HEALTH, limit=1)), None),
        journal=tuple(
            _happening(event) for event in care.events(board.name) if event.kind != HEALTH
        )[:JOURNAL],
    )


def _aside(found: Quarantine | None) -> Aside | None:
    return None if found is None else Aside(reason=found.reason, by=found.by, since=found.since)


def _happening(event: BoardEvent) -> Happening:
    return Happening(kind=event.kind, good=event.good, told=event.told, at=event.at)


def _left(store: Store, board: str) -> tuple[Left, ...]:
    """Runs of dead harnesses that the same command would still continue."""
    query = (
        sa.select(RunRow, CampaignRow)
        .join(CampaignRow, CampaignRow.id == RunRow.campaign_id)
        .where(
            RunRow.board == board,
            RunRow.state.in_(("planned", "running")),
            CampaignRow.finished_at.is_(None),
        )
        .order_by(RunRow.started_at)
    )
    with store.database.reading() as session:
        return tuple(
            Left(
                run_id=run.id,
                stage=run.stage,
                since=run.started_at,
                stopped=campaign.outcome is not None,
            )
            for run, campaign in session.execute(query)
            if is_dead(campaign.owner)
        )


def _ending(runs: pd.DataFrame) -> Ending | None:
    """The last row of a frame of runs."""
    if runs.empty:
        return None
    row = runs.iloc[-1]

    def text(name: str) -> str | None:
        value = row[name]
        return value if isinstance(value, str) and value else None

    finished = row["finished_at"]
    return Ending(
        stage=row["stage"],
        outcome=row["outcome"],
        headline=text("headline") or "",
        model=text("model_name") or "",
        at=(row["started_at"] if pd.isna(finished) else finished).to_pydatetime(),
        error_kind=text("error_kind"),
        remedy=text("remedy"),
    )


def _address(board: Board, running: dict[str, Any]) -> str:
    if board.virtual is None:
        host = f"[{board.host}]" if ":" in board.host else board.host
        return f"{board.user}@{host}:{board.port}"
    state = running.get(board.name)
    return f"{state.host}:{state.port}" if state else "stopped"
