"""Questions to the store, answered as pandas frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import sqlalchemy as sa

from harness.errors import HarnessError
from harness.store import raw
from harness.store.database import Database
from harness.store.models import CampaignRow, CheckRow, RunRow, SeriesRow
from harness.store.newest import newest
from harness.verdicts import Outcome

_STAGE_ORDER = ("tiny", "accuracy", "curve", "stress")
_CELL = ["board", "model_hash", "stage"]
NEWEST = 5  # runs of a cell in which its newest two verdicts usually are


class Frames:
    """Frames have one row per record, the oldest first, and the columns of the tables.

    JSON columns hold the decoded values, times are UTC with their zone.
    """

    def __init__(self, database: Database, raw_root: Path) -> None:
        self._database, self._raw_root = database, raw_root

    def runs(
        self,
        campaign: str | None = None,
        board: str | None = None,
        stage: str | None = None,
        model_hash: str | None = None,
        *,
        columns: Sequence[str] = (),
    ) -> pd.DataFrame:
        """`columns` of `runs`, by default all of them and its campaign's `campaign_kind`. Details
        are long: whoever lists many runs asks for what it shows."""
        if columns:
            query = sa.select(*(getattr(RunRow, name) for name in columns))
        else:
            query = sa.select(RunRow.__table__, CampaignRow.kind.label("campaign_kind")).join(
                CampaignRow, CampaignRow.id == RunRow.campaign_id
            )
        query = _filtered(query, campaign, board, stage, model_hash)
        return self._frame(query.order_by(RunRow.started_at, RunRow.id))

    def checks(
        self,
        campaign: str | None = None,
        board: str | None = None,
        stage: str | None = None,
        model_hash: str | None = None,
    ) -> pd.DataFrame:
        """One row per check: its columns, with board, stage, model and time of its run.

        `measured` and `limit` are numbers; what is a text is in `measured_text`, `limit_text`.
        """
        query = (
            sa.select(
                CheckRow.run_id,
                RunRow.campaign_id,
                RunRow.board,
                RunRow.model_hash,
                RunRow.model_name,
                RunRow.stage,
                RunRow.started_at,
                CheckRow.position,
                CheckRow.name,
                CheckRow.outcome,
                CheckRow.measured.label("measured"),
                CheckRow.measured_text,
                CheckRow.limit.label("limit"),
                CheckRow.limit_text,
                CheckRow.unit,
                CheckRow.sentence,
            )
            .join(RunRow, RunRow.id == CheckRow.run_id)
            .order_by(RunRow.started_at, RunRow.id, CheckRow.position)
        )
        frame = self._frame(_filtered(query, campaign, board, stage, model_hash))
        return frame.astype({"measured": "float64", "limit": "float64"})

    def latest_matrix(self) -> pd.DataFrame:
        """The newest verdict of each board, model and stage: the cells of the farm page.

        Columns: board, model_hash, model_name, scheme, stage, run_id, campaign_id, outcome,
        headline, culprit, error_kind, started_at, seconds, previous_outcome, previous_run_id,
        changed. `previous_…` is the same cell's verdict of an earlier campaign, None where there
        is none; `changed` says that the outcome differs from it. Runs without a verdict are left
        out. Ordered by board, model and stage (tiny, accuracy, curve, stress, others).

        Long histories are not read: of each cell the newest few runs, and all only where those
        do not hold two verdicts.
        """
        columns = [
            "board",
            "model_hash",
            "model_name",
            "scheme",
            "stage",
            "run_id",
            "campaign_id",
            "outcome",
            "headline",
            "culprit",
            "error_kind",
            "started_at",
            "seconds",
        ]
        added = ["previous_outcome", "previous_run_id", "changed"]
        query = sa.select(
            *(
                RunRow.id.label("run_id") if name == "run_id" else getattr(RunRow, name)
                for name in columns
            ),
            RunRow.attempt,
            RunRow.state,
        ).order_by(RunRow.started_at, RunRow.attempt, RunRow.id)
        rows = self._frame(query.where(RunRow.id.in_(newest(NEWEST))))
        if rows.empty:
            return pd.DataFrame(columns=columns + added)
        matrix = _matrix(rows)
        # A cell whose newest runs are all of one campaign, or have no verdict, may have older ones.
        sizes = rows.groupby(_CELL, dropna=False).size()
        full = {_cell(cell) for cell, count in sizes.items() if count >= NEWEST}
        told = matrix[matrix["previous_run_id"].notna()]
        open_cells = full - {_cell(cell) for cell in told[_CELL].itertuples(index=False)}
        if open_cells:
            places = sa.tuple_(RunRow.board, RunRow.stage)
            wanted = sorted({(board, stage) for board, _, stage in open_cells})
            older = [
                self._frame(query.where(places.in_(wanted[start : start + 200])))
                for start in range(0, len(wanted), 200)
            ]
            rows = pd.concat([rows, *older]).drop_duplicates("run_id")
            matrix = _matrix(rows.sort_values(["started_at", "attempt", "run_id"]))
        if matrix.empty:
            return pd.DataFrame(columns=columns + added)
        return matrix[columns + added]

    def verdicts(self, kind: str, newest: int) -> pd.DataFrame:
        """Every verdict of the newest campaigns of one kind: run_id, campaign_id, campaign_at (its
        start), board, stage, attempt, outcome, headline, error_kind, model_hash, parameters."""
        campaigns = (
            sa.select(CampaignRow.id)
            .where(CampaignRow.kind == kind)
            .order_by(CampaignRow.started_at.desc(), CampaignRow.id)
            .limit(newest)
        )
        query = (
            sa.select(
                RunRow.id.label("run_id"),
                RunRow.campaign_id,
                CampaignRow.started_at.label("campaign_at"),
                RunRow.board,
                RunRow.stage,
                RunRow.attempt,
                RunRow.outcome,
                RunRow.headline,
                RunRow.error_kind,
                RunRow.model_hash,
                RunRow.parameters,
            )
            .join(CampaignRow, CampaignRow.id == RunRow.campaign_id)
            .where(RunRow.state == "judged", RunRow.campaign_id.in_(campaigns))
            .order_by(CampaignRow.started_at, RunRow.started_at, RunRow.attempt, RunRow.id)
        )
        return self._frame(query)

    def history(
        self,
        metric: str,
        board: str | None = None,
        stage: str | None = None,
        model_hash: str | None = None,
    ) -> pd.DataFrame:
        """One check over time: board, model_hash, model_name, stage, run_id, campaign_id,
        engine_hash, started_at, measured, limit, unit, outcome. `metric` is the check's name.

        Runs that ended as ERROR or INVALID measured nothing and are left out.
        """
        query = (
            sa.select(
                RunRow.board,
                RunRow.model_hash,
                RunRow.model_name,
                RunRow.stage,
                RunRow.id.label("run_id"),
                RunRow.campaign_id,
                RunRow.engine_hash,
                RunRow.started_at,
                CheckRow.measured.label("measured"),
                CheckRow.limit.label("limit"),
                CheckRow.unit,
                CheckRow.outcome,
            )
            .join(CheckRow, CheckRow.run_id == RunRow.id)
            .where(
                CheckRow.name == metric,
                CheckRow.measured.is_not(None),
                RunRow.outcome.not_in([Outcome.ERROR.value, Outcome.INVALID.value]),
            )
            .order_by(RunRow.started_at, RunRow.id)
        )
        frame = self._frame(_filtered(query, None, board, stage, model_hash))
        return frame.astype({"measured": "float64", "limit": "float64"})

    def series(self, run_id: str, name: str) -> pd.DataFrame:
        """A raw series of a run.

        An array file becomes a column per one-dimensional array (shorter ones end in missing
        values), columns `array.0`, `array.1` … per two-dimensional one, and a constant column per
        number. "events" has n, t_ns, kind, data; "samples" is the resource samples among them,
        nested values as `temperatures.zone0`. Raises HarnessError: unknown series, a file that is
        missing or changed since it was stored, or an array with more dimensions.
        """
        stored = raw.EVENTS if name == raw.SAMPLES else name
        with self._database.reading() as session:
            rows = session.scalars(sa.select(SeriesRow).where(SeriesRow.run_id == run_id)).all()
        row = next((row for row in rows if row.name == stored), None)
        if row is None:
            known = ", ".join(sorted(row.name for row in rows)) or "none"
            raise HarnessError(f"run {run_id} has no series {name!r}", expected=f"one of: {known}")
        path = self._raw_root / row.path
        if not path.is_file():
            raise HarnessError("the raw file is missing", where=str(path))
        if raw.sha256(path) != row.sha256:
            raise HarnessError(
                "the raw file has changed since it was stored",
                where=str(path),
                expected=f"sha256 {row.sha256}",
            )
        return raw.read_frame(path, name)

    def series_names(self, run_id: str) -> list[str]:
        """The series that `series` can read."""
        query = sa.select(SeriesRow.name).where(SeriesRow.run_id == run_id)
        with self._database.reading() as session:
            names = sorted(session.scalars(query))
        return [*names, raw.SAMPLES] if raw.EVENTS in names else names

    def _frame(self, query: sa.Select[*tuple[Any, ...]]) -> pd.DataFrame:
        with self._database.reading() as session:
            result = session.execute(query)
            names = list(result.keys())
            rows = [tuple(row) for row in result]
        frame = pd.DataFrame(rows, columns=pd.Index(names), dtype=object)
        # Objects keep None and nested values as they are; only times and numbers get a type.
        for name in names:
            if name.endswith("_at"):
                frame[name] = pd.to_datetime(frame[name], utc=True)
            elif name in ("seconds",):
                frame[name] = frame[name].astype("float64")
            elif name in ("attempt", "position"):
                frame[name] = frame[name].astype("int64")
        return frame


def _cell(key: Any) -> tuple[Any, ...]:
    """Board, model_hash and stage, with None for a missing hash whatever pandas made of it."""
    board, model_hash, stage = key
    return board, model_hash if isinstance(model_hash, str) else None, stage


def _matrix(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest verdict of each cell, with that of an earlier campaign. `rows` are in order."""
    judged = rows[rows["state"] == "judged"]
    # A campaign counts once per cell: its last attempt.
    last = judged.groupby([*_CELL, "campaign_id"], dropna=False, sort=False).tail(1)
    cells = last.groupby(_CELL, dropna=False, sort=False)
    previous = cells[["outcome", "run_id"]].shift(1)
    matrix = last.assign(previous_outcome=previous["outcome"], previous_run_id=previous["run_id"])
    matrix = matrix.groupby(_CELL, dropna=False, sort=False).tail(1)
    matrix = matrix.astype({"previous_outcome": object, "previous_run_id": object})
    for name in ("previous_outcome", "previous_run_id"):
        matrix[name] = matrix[name].where(matrix[name].notna(), None)
    matrix["changed"] = matrix["previous_outcome"].notna() & (
        matrix["previous_outcome"] != matrix["outcome"]
    )
    order = {name: index for index, name in enumerate(_STAGE_ORDER)}
    rank = matrix["stage"].map(lambda stage: order.get(stage, len(order)))
    matrix = matrix.assign(_rank=rank).sort_values(
        ["board", "model_name", "model_hash", "_rank", "stage"], kind="stable"
    )
    return matrix.drop(columns="_rank").reset_index(drop=True)


def _filtered(
    query: sa.Select[*tuple[Any, ...]],
    campaign: str | None,
    board: str | None,
    stage: str | None,
    model_hash: str | None,
) -> sa.Select[*tuple[Any, ...]]:
    wanted = [
        (RunRow.campaign_id, campaign),
        (RunRow.board, board),
        (RunRow.stage, stage),
        (RunRow.model_hash, model_hash),
    ]
    for column, value in wanted:
        if value is not None:
            query = query.where(column == value)
    return query
