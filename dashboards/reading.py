"""From the store to the pages' records. With `reading_searches`, the only module here that knows
the database."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, selectinload

from dashboards import reading_nights, reading_searches
from dashboards.data import (
    Board,
    Campaign,
    Case,
    CrashGroup,
    Details,
    Results,
    Run,
    SeriesFile,
    cases_of,
)
from engine.records import Event, RecordError
from harness.farm.series import KIND
from harness.store import Store
from harness.store.crashes import note_of
from harness.store.models import (
    BoardRow,
    CampaignRow,
    CheckRow,
    CrashRow,
    ModelRow,
    NumbersRow,
    RunRow,
)
from harness.store.newest import parts_of_newest
from harness.store.owner import is_dead
from harness.verdicts import Check, Outcome

WINDOW = 12  # newest runs of one board, model and stage that are looked at
KEPT = 5  # of them that keep a page; older ones stay in the store
LEAST_KEPT = 2  # where there are so many boards that all together would be more than
MOST_PAGES = 2000
RECENT = 3  # newest campaigns whose runs may still change
MOST_PARAMETERS = 200  # SQLite takes a bounded number of them
READY_WITHIN = 200  # lines of a run's events in which its `ready` must come
_LINE_LIMIT = 1 << 20
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}

_LIGHT = (
    RunRow.id,
    RunRow.campaign_id,
    RunRow.board,
    RunRow.model_hash,
    RunRow.model_name,
    RunRow.scheme,
    RunRow.stage,
    RunRow.state,
    RunRow.outcome,
    RunRow.headline,
    RunRow.culprit,
    RunRow.remedy,
    RunRow.error_kind,
    RunRow.attempt,
    RunRow.seconds,
    RunRow.started_at,
    RunRow.finished_at,
)


def stamp(store: Store) -> tuple[object, ...]:
    """Changes whenever results arrive or a run changes its state; cheap enough to ask often.

    All runs are counted, but only those of the newest campaigns and of unfinished ones are looked
    at: the others are over.
    """
    with store.database.reading() as session:
        newest = sa.select(CampaignRow.id).order_by(CampaignRow.started_at.desc()).limit(RECENT)
        recent = set(session.scalars(newest))
        recent |= set(
            session.scalars(sa.select(CampaignRow.id).where(CampaignRow.finished_at.is_(None)))
        )
        runs = session.execute(
            sa.select(RunRow.state, sa.func.count(), sa.func.max(RunRow.finished_at))
            .where(RunRow.campaign_id.in_(sorted(recent)[:MOST_PARAMETERS]))
            .group_by(RunRow.state)
            .order_by(RunRow.state)
        ).all()
        count = session.scalar(sa.select(sa.func.count()).select_from(RunRow))
        campaigns = session.execute(
            sa.select(sa.func.count(), sa.func.max(CampaignRow.finished_at))
        ).all()
        found = (*reading_searches.stamp(session), *reading_nights.stamp(session))
    return (*(tuple(row) for row in runs), count, *(tuple(row) for row in campaigns), *found)


def load(store: Store) -> Results:
    """Everything the site shows, with the long fields of all runs that keep a page."""
    results = outline(store)
    whole = whole_runs(store, {run.id for run in results.runs})
    cases = tuple(fill(case, whole) for case in results.cases)
    nights = reading_nights.load(store)
    runs = tuple(dataclasses.replace(run, **whole[run.id]) for run in results.runs)
    return dataclasses.replace(results, cases=cases, runs=runs, nights=nights)


def outline(store: Store) -> Results:
    """Everything the site shows but the long fields of runs (checks, details, facts, series) and
    the series of nights.

    Of each board, model and stage the newest runs are known, older ones stay in the store.
    """
    with store.database.reading() as session:
        campaigns = {
            row.id: _campaign(row)
            for row in session.scalars(
                sa.select(CampaignRow).order_by(CampaignRow.started_at.desc(), CampaignRow.id)
            )
        }
        boards = {row.name: _board(row) for row in session.scalars(sa.select(BoardRow))}
        part = parts_of_newest(WINDOW)
        product = (
            sa.select(*_LIGHT, NumbersRow.run_id.label("numbered"))
            .join(part, sa.and_(RunRow.campaign_id == part.c[0], RunRow.board == part.c[1]))
            .outerjoin(NumbersRow, NumbersRow.run_id == RunRow.id)
            # A health check tells something about a board, not about a model.
            .where(RunRow.stage != "health")
        )
        rows: Sequence[Any] = session.execute(product).all()
        crashes = _crashes(session)
        sought = reading_searches.load(session)
        known = {
            row.hash: row.hyperparameters
            for row in session.scalars(sa.select(ModelRow))
            if row.hyperparameters
        }
    models = _models(rows)
    light = [
        _light_run(row, campaigns[row.campaign_id], _board_of(boards, row.board), models[row.id])
        for row in rows
    ]
    cases = tuple(
        dataclasses.replace(case, hyperparameters=known.get(case.model_hash, {}))
        for case in cases_of(light)
    )
    kept = _kept(cases)
    paged = tuple(run for run in light if run.id in kept)
    newest = [one.id for one in campaigns.values() if one.kind == KIND]
    numbered = {row.id for row in rows if row.numbered is not None}
    nights = dataclasses.replace(
        reading_nights.outline(store),
        measured=_measured(light, numbered, set(newest[: reading_nights.SHOWN_NIGHTS])),
    )
    return Results(cases, tuple(campaigns.values()), paged, crashes, sought, nights=nights)


def _measured(
    runs: Sequence[Run], numbered: AbstractSet[str], campaigns: AbstractSet[str]
) -> frozenset[tuple[str, str, str]]:
    """(board, model, scheme) that has a number of one of these campaigns, as series count them."""
    return frozenset(
        (run.board.name, run.model, run.scheme)
        for run in runs
        if run.id in numbered
        and run.campaign.id in campaigns
        and run.state == "judged"
        and run.outcome is not Outcome.ERROR
    )


def fill(case: Case, whole: Mapping[str, Mapping[str, Any]]) -> Case:
    """The case with the long fields of its runs, where `whole` has them."""

    def filled(run: Run) -> Run:
        return dataclasses.replace(run, **whole[run.id]) if run.id in whole else run

    return dataclasses.replace(
        case,
        runs={stage: filled(run) for stage, run in case.runs.items()},
        earlier={stage: filled(run) for stage, run in case.earlier.items()},
        history=tuple(filled(run) for run in case.history),
    )


def _crashes(session: Session) -> tuple[CrashGroup, ...]:
    """Crashes by signature."""
    query = sa.select(CrashRow).order_by(CrashRow.seen_at.desc(), CrashRow.run_id)
    found: dict[str, list[CrashRow]] = {}
    for row in session.scalars(query):
        found.setdefault(row.hash, []).append(row)
    groups = []
    for key, rows in found.items():
        note = note_of(rows[0])
        again = next((row.reproducer for row in rows if row.reproducer), {})
        groups.append(
            CrashGroup(
                key,
                note.name,
                note.signature,
                note.headline,
                note.sentence,
                note.remedy,
                note.op,
                note.facts,
                tuple(CrashGroup.Seen(r.run_id, r.board, r.stage, r.seen_at) for r in rows),
                *(str(again.get(name) or "") for name in ("command", "rate", "words")),
            )
        )
    return tuple(groups)


def _board_of(boards: Mapping[str, Board], name: str) -> Board:
    return boards.get(name) or Board(name)


def _models(rows: Sequence[Any]) -> dict[str, tuple[str, str, str]]:
    """(model, scheme, hash) that each run counts for.

    The tiny stage runs a small model of its own; it belongs to the model that the same campaign
    brings up on the same board, where there is one.
    """
    own = {row.id: (row.model_name or "", row.scheme or "", row.model_hash or "") for row in rows}
    large: dict[tuple[str, str], tuple[str, str, str]] = {}
    for row in rows:
        if row.stage != "tiny" and own[row.id][0]:
            large.setdefault((row.campaign_id, row.board), own[row.id])
    return {
        row.id: large.get((row.campaign_id, row.board), own[row.id])
        if row.stage == "tiny" or not own[row.id][0]
        else own[row.id]
        for row in rows
    }


def _kept(cases: Sequence[Case]) -> set[str]:
    """Ids of the runs that keep a page: the newest few of each stage, and what they are compared
    with. Fewer where there are many boards: the site would grow beyond what is looked at."""
    stages = sum(len(case.runs) for case in cases)
    few = max(LEAST_KEPT, min(KEPT, MOST_PAGES // max(stages, 1)))
    kept: set[str] = set()
    for case in cases:
        seen: dict[str, int] = {}
        for run in case.history:
            seen[run.stage] = seen.get(run.stage, 0) + 1
            if seen[run.stage] <= few:
                kept.add(run.id)
        kept.update(run.id for run in case.earlier.values())
    return kept


def whole_runs(store: Store, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The long fields of some runs, by id."""
    found: dict[str, dict[str, Any]] = {}
    ordered = sorted(ids)
    with store.database.reading() as session:
        for start in range(0, len(ordered), MOST_PARAMETERS):
            query = (
                sa.select(RunRow)
                .where(RunRow.id.in_(ordered[start : start + MOST_PARAMETERS]))
                .options(selectinload(RunRow.checks), selectinload(RunRow.series))
            )
            for row in session.scalars(query):
                found[row.id] = _long_fields(row, store.raw_root)
    return found


def _long_fields(row: RunRow, raw_root: Path) -> dict[str, Any]:
    return {
        "checks": tuple(_check(check) for check in row.checks),
        "details": Details(row.stage, row.details),
        "engine_hash": row.engine_hash or "",
        "toolchain": row.toolchain or "",
        "power_mode": row.power_mode or "",
        "boot_id": row.boot_id or "",
        "clocks": row.clocks or "",
        "parameters": row.parameters or {},
        "facts": row.facts or {},
        "deployment": row.deployment or {},
        "series": tuple(
            SeriesFile(one.name, one.path, one.sha256, one.bytes) for one in row.series
        ),
        "ready": ready_event(raw_root / row.id / "events.jsonl"),
        "engine": row.engine or {},
    }


def _campaign(row: CampaignRow) -> Campaign:
    over = row.finished_at is not None or is_dead(row.owner)
    return Campaign(
        row.id,
        row.kind,
        shlex.join(row.command or ()),
        row.outcome,
        row.started_at,
        row.finished_at,
        over,
    )


def _board(row: BoardRow) -> Board:
    return Board(
        row.name,
        row.host or "",
        bool(row.virtual),
        tuple(row.tags or ()),
        row.budget or {},
        row.facts or {},
    )


def _light_run(row: Any, campaign: Campaign, board: Board, model: tuple[str, str, str]) -> Run:
    return Run(
        id=row.id,
        campaign=campaign,
        board=board,
        model=model[0],
        scheme=model[1],
        model_hash=model[2],
        stage=row.stage,
        state=row.state,
        outcome=_OUTCOMES.get(row.outcome or ""),
        headline=row.headline or "",
        culprit=row.culprit,
        remedy=row.remedy,
        error_kind=row.error_kind,
        checks=(),
        details=Details(row.stage, None),
        started_at=row.started_at,
        finished_at=row.finished_at,
        seconds=row.seconds,
        attempt=row.attempt,
    )


def _check(row: CheckRow) -> Check:
    return Check.model_construct(  # a stored check is shown as it is, even of another version
        name=row.name,
        outcome=row.outcome,
        measured=row.measured_text if row.measured_text is not None else row.measured,
        limit=row.limit_text if row.limit_text is not None else row.limit,
        unit=row.unit,
        sentence=row.sentence,
    )


def ready_event(path: Path) -> Mapping[str, Any]:
    """What the engine said of itself when it was ready; empty where it never was.

    A broken line ends the search: this is a note on a page, and the run's verdict stands without.
    """
    try:
        with path.open("rb") as file:
            for _ in range(READY_WITHIN):
                line = file.readline(_LINE_LIMIT)
                if not line.endswith(b"\n"):
                    return {}
                event = Event.from_line(line)
                if event.kind == "ready":
                    return event.data
    except (OSError, RecordError):
        pass
    return {}
