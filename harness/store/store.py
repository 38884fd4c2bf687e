"""Results: campaigns, runs with their checks and raw series. All writing goes through `Store`."""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, selectinload

from harness.errors import HarnessError
from harness.paths import made_folder, state_dir
from harness.store import crashes, numbers, raw
from harness.store.database import Database
from harness.store.export import export_table
from harness.store.frames import Frames
from harness.store.models import (
    BoardRow,
    CampaignRow,
    CheckRow,
    ModelRow,
    RunRow,
    SeriesRow,
    TuningRow,
)
from harness.store.owner import current_owner, is_dead
from harness.verdicts import Check, Outcome, Verdict

KEPT_TUNINGS = 40  # of one board: some models, and the engines of some weeks

_Row = TypeVar("_Row", CampaignRow, RunRow)


def options_hash(options: Mapping[str, Any]) -> str:
    """Same options, same hash, whatever their order. `options` is plain JSON."""
    text = json.dumps(options, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """The results database and the folder of raw files beside it.

    Safe to share between threads; several processes may open the same one.
    """

    def __init__(self, database: Database, raw_root: Path) -> None:
        self.database, self.raw_root = database, raw_root
        self.frames = Frames(database, raw_root)

    @staticmethod
    def open(path: Path | str | None = None) -> Store:
        """Opens or creates it, and brings its schema up to date.

        `path` is a SQLite file (default: results.sqlite in the state folder) or a PostgreSQL URL.
        Raw files lie in `raw/` beside a SQLite file, and in the state folder otherwise.
        Raises HarnessError: not writable, no results database, written by a newer harness.
        """
        target = state_dir() / "results.sqlite" if path is None else path
        database = Database(target)
        beside = Path(database.label).parent if database.is_sqlite else state_dir()
        return Store(database, beside / "raw")

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Boards and models

    def record_board(self, name: str, **values: Any) -> None:
        """Creates or updates a board: host, serial, virtual, tags, budget, facts, boot_id.

        Unnamed columns keep their value; `last_seen` is now.
        """
        with self.database.writing() as session:
            self._upsert_board(session, name, {**values, "last_seen": _now()})

    def record_model(self, hash: str, **values: Any) -> None:
        """Creates or updates a model: name, scheme, source_sha256, hyperparameters, notes, bytes.

        `hash` is the sha256 of the package. Unnamed columns keep their value.
        """
        with self.database.writing() as session:
            self._upsert_model(session, hash, values)

    # Campaigns

    def begin_campaign(self, kind: str, command: Sequence[str], options: Mapping[str, Any]) -> str:
        """A new campaign of this process; returns its id. `options` decide what it repeats."""
        row = CampaignRow(
            id=str(uuid.uuid4()),
            kind=kind,
            command=list(command),
            options=dict(options),
            options_hash=options_hash(options),
            owner=current_owner(),
            started_at=_now(),
        )
        with self.database.writing() as session:
            session.add(row)
        return row.id

    def finish_campaign(self, campaign_id: str, outcome: Outcome) -> None:
        with self.database.writing() as session:
            row = _get(session, CampaignRow, campaign_id)
            row.outcome, row.finished_at = outcome.value, _now()

    def interrupted_campaign(self, kind: str, options_hash: str) -> str | None:
        """The latest campaign with these options that never finished and whose process is dead.

        It belongs to this process afterwards, so that only one of two that ask gets it.
        """
        with self.database.writing() as session:
            rows = session.scalars(
                sa.select(CampaignRow)
                .where(
                    CampaignRow.kind == kind,
                    CampaignRow.options_hash == options_hash,
                    CampaignRow.finished_at.is_(None),
                )
                .order_by(CampaignRow.started_at.desc(), CampaignRow.id)
            )
            for row in rows:
                if is_dead(row.owner):
                    row.owner = current_owner()
                    return row.id
        return None

    def campaign(self, campaign_id: str) -> CampaignRow:
        with self.database.reading() as session:
            return _get(session, CampaignRow, campaign_id)

    def find_campaign(self, text: str) -> str:
        """The id that begins with `text`, or the newest for "last".

        Raises HarnessError if there is none, or more than one.
        """
        if text != "last":
            return self._find(CampaignRow, text)
        with self.database.reading() as session:
            newest = session.scalars(
                sa.select(CampaignRow.id).order_by(CampaignRow.started_at.desc()).limit(1)
            ).first()
        if newest is None:
            raise HarnessError("there is no campaign yet", remedy="run `harness bringup`")
        return newest

    # Runs

    def begin_run(
        self,
        *,
        campaign_id: str,
        board: str,
        stage: str,
        parameters: Mapping[str, Any] | None = None,
        model_hash: str | None = None,
        model_name: str | None = None,
        scheme: str | None = None,
        quant_hash: str | None = None,
        engine_hash: str | None = None,
        toolchain: str | None = None,
        power_mode: str | None = None,
        boot_id: str | None = None,
        facts: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> str:
        """Records a planned run and returns its id. `run_id` names it where one was made already.

        Its attempt is one more than the campaign's earlier runs of this board and stage.
        """
        row = RunRow(
            id=run_id or str(uuid.uuid4()),
            campaign_id=campaign_id,
            board=board,
            stage=stage,
            parameters=dict(parameters or {}),
            model_hash=model_hash,
            model_name=model_name,
            scheme=scheme,
            quant_hash=quant_hash,
            engine_hash=engine_hash,
            toolchain=toolchain,
            power_mode=power_mode,
            boot_id=boot_id,
            facts=None if facts is None else dict(facts),
            state="planned",
            started_at=_now(),
        )
        with self.database.writing() as session:
            _get(session, CampaignRow, campaign_id)
            self._upsert_board(session, board, {})
            if model_hash is not None:
                known = {"name": model_name, "scheme": scheme}
                known = {key: value for key, value in known.items() if value is not None}
                self._upsert_model(session, model_hash, known)
            earlier = session.scalar(
                sa.select(sa.func.max(RunRow.attempt)).where(
                    RunRow.campaign_id == campaign_id, RunRow.board == board, RunRow.stage == stage
                )
            )
            row.attempt = (earlier or 0) + 1
            session.add(row)
        return row.id

    def running(self, run_id: str, remote_spool: str, deployment: Mapping[str, Any]) -> None:
        """The run was started on its board: where its spool lies, and what was deployed."""
        with self.database.writing() as session:
            row = _get(session, RunRow, run_id)
            row.state, row.remote_spool = "running", remote_spool
            row.deployment = dict(deployment)

    def collected(self, run_id: str) -> None:
        """All that the run wrote is in its raw folder; only the verdict is missing."""
        with self.database.writing() as session:
            _get(session, RunRow, run_id).state = "collected"

    def raw_folder(self, run_id: str) -> Path:
        """Where the run's events.jsonl and arrays/ belong; created.

        Raises HarnessError where it cannot be made.
        """
        return made_folder(self.raw_root / run_id, "HARNESS_HOME")

    def finish_run(
        self,
        run_id: str,
        verdict: Verdict,
        folder: Path | None = None,
        *,
        error_kind: str | None = None,
        boot_id: str | None = None,
        clocks: str | None = None,
        seconds: float | None = None,
    ) -> None:
        """Writes the verdict, its checks and the series of `folder` in one transaction.

        `folder` is the run's raw folder (the default, where it exists) or another, which is then
        copied there. `clocks` and `seconds` default to what the details and the events say.
        Finishing a run again replaces its verdict. Raises HarnessError for an unknown run.
        """
        kept = raw.adopt(folder, self.raw_root, run_id)
        files = raw.scan(kept, self.raw_root) if kept is not None else []
        if seconds is None and kept is not None:
            seconds = raw.duration(kept)
        engine = raw.engine_of(kept) if kept is not None else None
        if clocks is None and isinstance(verdict.details.get("clocks"), str):
            clocks = verdict.details["clocks"]
        with self.database.writing() as session:
            row = _get(session, RunRow, run_id)
            # Deleted first: the new rows repeat the unique keys of the old.
            row.checks.clear()
            row.series.clear()
            session.flush()
            row.state, row.outcome, row.finished_at = "judged", verdict.outcome.value, _now()
            row.headline, row.culprit, row.remedy = (
                verdict.headline,
                verdict.culprit,
                verdict.remedy,
            )
            row.details = dict(verdict.details) or None
            row.error_kind, row.seconds = error_kind, seconds
            row.clocks = clocks if clocks is not None else row.clocks
            row.boot_id = boot_id or row.boot_id
            row.engine = engine if engine is not None else row.engine
            row.checks = [check_row(index, check) for index, check in enumerate(verdict.checks)]
            row.series = [
                SeriesRow(name=file.name, path=file.path, sha256=file.sha256, bytes=file.bytes)
                for file in files
            ]
            crashes.keep(session, row, verdict.crash)
            numbers.keep(session, row)

    def run(self, run_id: str) -> RunRow:
        """The run with its checks and series. Raises HarnessError for an unknown id."""
        with self.database.reading() as session:
            row = session.scalars(_whole_runs().where(RunRow.id == run_id)).one_or_none()
        if row is None:
            raise _unknown("run", run_id)
        return row

    def find_run(self, text: str) -> str:
        """The id that begins with `text`. Raises HarnessError if there is none, or more."""
        return self._find(RunRow, text)

    def _find(self, kind: type[CampaignRow] | type[RunRow], text: str) -> str:
        query = sa.select(kind.id).where(kind.id.startswith(text, autoescape=True)).limit(2)
        with self.database.reading() as session:
            found = session.scalars(query).all()
        what = "campaign" if kind is CampaignRow else "run"
        if not found or not text:
            raise _unknown(what, text)
        if len(found) > 1:
            raise HarnessError(
                f"more than one {what} begins with {text!r}", remedy="give more of its characters"
            )
        return found[0]

    def unfinished(self, campaign_id: str, board: str) -> list[RunRow]:
        """The campaign's runs on this board without a verdict, the oldest first."""
        return [row for row in self.campaign_runs(campaign_id, board) if row.state != "judged"]

    def campaign_runs(self, campaign_id: str, board: str | None = None) -> list[RunRow]:
        """All runs of a campaign (on one board), with checks and series, the oldest first."""
        query = _whole_runs().where(RunRow.campaign_id == campaign_id)
        if board is not None:
            query = query.where(RunRow.board == board)
        with self.database.reading() as session:
            return list(session.scalars(query.order_by(RunRow.started_at, RunRow.attempt)))

    # What boards run best with

    def record_tuning(
        self,
        board: str,
        key: str,
        *,
        engine_hash: str,
        facts_hash: str,
        model_hash: str,
        run_id: str,
        found: Mapping[str, Any],
    ) -> None:
        """Keeps what a board was measured to run best with, under everything that it was measured
        with; of a board's, the newest KEPT_TUNINGS."""
        with self.database.writing() as session:
            row = session.get(TuningRow, (board, key)) or TuningRow(board=board, key=key)
            row.engine_hash, row.facts_hash, row.model_hash = engine_hash, facts_hash, model_hash
            row.run_id, row.found, row.measured_at = run_id, dict(found), _now()
            session.add(row)
            session.flush()
            old = session.scalars(
                sa.select(TuningRow)
                .where(TuningRow.board == board)
                .order_by(TuningRow.measured_at.desc())
                .offset(KEPT_TUNINGS)
            ).all()
            for tuning in old:
                session.delete(tuning)

    def tuning(self, board: str, key: str) -> TuningRow | None:
        """What `record_tuning` kept under the same key, None when there is nothing."""
        with self.database.reading() as session:
            return session.get(TuningRow, (board, key))

    def export(
        self,
        path: Path,
        format: str | None = None,
        *,
        table: str = "runs",
        campaign: str | None = None,
        board: str | None = None,
        stage: str | None = None,
    ) -> int:
        """Writes `table` ("runs" or "checks") to `path`; returns the number of rows.

        `format` is csv, json or parquet; None takes it from the file's ending. Raises HarnessError
        for an unknown format, and for parquet where pyarrow is missing.
        """
        query = {"runs": self.frames.runs, "checks": self.frames.checks}.get(table)
        if query is None:
            raise HarnessError(f"no table {table!r} to export", expected="runs or checks")
        frame = query(campaign=campaign, board=board, stage=stage)
        return export_table(frame, path, format)

    def _upsert_board(self, session: Session, name: str, values: Mapping[str, Any]) -> None:
        row = session.get(BoardRow, name)
        if row is None:
            row = BoardRow(name=name)
            session.add(row)
        _assign(row, values)
        session.flush()

    def _upsert_model(self, session: Session, key: str, values: Mapping[str, Any]) -> None:
        row = session.get(ModelRow, key)
        if row is None:
            row = ModelRow(hash=key)
            session.add(row)
        _assign(row, values)
        session.flush()


def check_row(position: int, check: Check) -> CheckRow:
    measured, measured_text = _number_or_text(check.measured)
    limit, limit_text = _number_or_text(check.limit)
    return CheckRow(
        position=position,
        name=check.name,
        outcome=check.outcome.value,
        measured=measured,
        measured_text=measured_text,
        limit=limit,
        limit_text=limit_text,
        unit=check.unit,
        sentence=check.sentence,
    )


def _number_or_text(value: float | str | None) -> tuple[float | None, str | None]:
    return (None, value) if isinstance(value, str) else (value, None)


def _assign(row: BoardRow | ModelRow, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key not in type(row).__table__.columns:
            raise ValueError(f"{type(row).__tablename__} has no column {key!r}")
        setattr(row, key, list(value) if isinstance(value, tuple) else value)


def _whole_runs() -> sa.Select[RunRow]:
    return sa.select(RunRow).options(selectinload(RunRow.checks), selectinload(RunRow.series))


def _get(session: Session, kind: type[_Row], key: str) -> _Row:
    row = session.get(kind, key)
    if row is None:
        raise _unknown("campaign" if kind is CampaignRow else "run", key)
    return row


def _unknown(what: str, key: str) -> HarnessError:
    return HarnessError(
        f"no {what} {key!r} in the results",
        remedy="`harness results show` lists what there is",
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
