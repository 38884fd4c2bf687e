"""Crashes in the results store: the same signature on several boards is one crash."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from harness.errors import HarnessError
from harness.store.models import CrashRow
from harness.verdicts import CrashNote

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from harness.store.models import RunRow
    from harness.store.store import Store


@dataclasses.dataclass(frozen=True)
class CrashGroup:
    """All crashes of one signature. `newest` speaks for them."""

    hash: str
    count: int
    boards: tuple[str, ...]
    first_seen: datetime.datetime
    last_seen: datetime.datetime
    newest: CrashRow
    runs: tuple[str, ...]  # the newest first

    @property
    def reproducer(self) -> Mapping[str, Any] | None:
        """The newest one that was made for any of them is on `newest` where there is one."""
        return self.newest.reproducer


def keep(session: Session, run: RunRow, note: CrashNote | None) -> None:
    """The crash of a run, in place of what was known of it. What reproduces it stays."""
    row = session.get(CrashRow, run.id)
    if note is None:
        if row is not None:
            session.delete(row)
        return
    if row is None:
        row = CrashRow(run_id=run.id, board=run.board, stage=run.stage)
        row.seen_at = datetime.datetime.now(datetime.UTC)
        session.add(row)
    elif row.hash != note.hash:
        row.reproducer = None
    row.name, row.hash, row.finer = note.name, note.hash, note.finer
    row.signature, row.op, row.headline = note.signature, note.op[:200] or None, note.headline
    row.sentence, row.remedy = note.sentence, note.remedy
    row.facts = {"lines": [list(fact) for fact in note.facts]}


def note_of(row: CrashRow) -> CrashNote:
    """The row as the verdict held it."""
    lines: Sequence[Any] = row.facts.get("lines") or ()
    return CrashNote(
        name=row.name,
        signature=row.signature,
        hash=row.hash,
        finer=row.finer,
        headline=row.headline,
        sentence=row.sentence,
        remedy=row.remedy,
        op=row.op or "",
        facts=tuple((str(line[0]), str(line[1])) for line in lines),
    )


class Crashes:
    """All crashes of one store."""

    def __init__(self, store: Store) -> None:
        self._database = store.database

    def of_run(self, run_id: str) -> CrashRow | None:
        with self._database.reading() as session:
            return session.get(CrashRow, run_id)

    def groups(self, board: str | None = None) -> list[CrashGroup]:
        """Crashes by signature, the one seen last first; with `board` those of it alone."""
        query = sa.select(CrashRow).order_by(CrashRow.seen_at.desc(), CrashRow.run_id)
        if board is not None:
            query = query.where(CrashRow.board == board)
        with self._database.reading() as session:
            rows = list(session.scalars(query))
        found: dict[str, list[CrashRow]] = {}
        for row in rows:
            found.setdefault(row.hash, []).append(row)
        return [_group(key, members) for key, members in found.items()]

    def group(self, key: str) -> CrashGroup:
        """The group whose hash begins with `key`. Raises HarnessError for none or several."""
        found = [group for group in self.groups() if key and group.hash.startswith(key)]
        if len(found) != 1:
            many = f"more than one crash begins with {key!r}"
            raise HarnessError(
                many if found else f"no crash {key!r} in the results",
                remedy="`harness triage` lists them",
            )
        return found[0]

    def keep_reproducer(self, run_id: str, reproducer: Mapping[str, Any]) -> None:
        """The command that shows a run's crash again, and how often it does."""
        with self._database.writing() as session:
            row = session.get(CrashRow, run_id)
            if row is None:
                raise HarnessError(
                    f"no crash of run {run_id!r} in the results",
                    remedy="`harness triage` lists them",
                )
            row.reproducer = dict(reproducer)


def _group(key: str, members: Sequence[CrashRow]) -> CrashGroup:
    newest = next((row for row in members if row.reproducer), members[0])
    return CrashGroup(
        key,
        len(members),
        tuple(sorted({row.board for row in members})),
        min(row.seen_at for row in members),
        max(row.seen_at for row in members),
        newest,
        tuple(row.run_id for row in members),
    )
