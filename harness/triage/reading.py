"""Runs of the results store as cases: what a run left here, and what the store knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.spool import EVENTS_NAME
from harness.jobs.runlog import RunLog
from harness.store import raw
from harness.store.crashes import Crashes, note_of
from harness.triage.case import Case
from harness.triage.judging import crash_of

if TYPE_CHECKING:
    from harness.store import RunRow, Store
    from harness.verdicts import CrashNote

LOST = {"board-lost": "lost", "board-reset": "board-reset"}  # kinds of trouble → status of a log


def log_of(store: Store, row: RunRow) -> RunLog | None:
    """What the run left in the store's folder; None when nothing came from the board.

    Raises HarnessError for events that cannot be read.
    """
    folder = store.raw_root / row.id
    path = folder / EVENTS_NAME
    if not path.is_file():
        return None
    events = list(raw.events(path))
    end = events[-1].data if events and events[-1].kind == "run-end" else {}
    status = LOST.get(row.error_kind or "", str(end.get("status") or "lost"))
    reason = str(end.get("reason") or row.headline or "")
    if row.error_kind in LOST:
        reason = row.headline or reason
    return RunLog(row.id, events, folder, status, reason)


def case_of(store: Store, row: RunRow) -> Case | None:
    log = log_of(store, row)
    return None if log is None else Case(log, row.facts or {})


def crash_in_store(store: Store, row: RunRow) -> CrashNote | None:
    """The run's crash: looked into anew where what it left is still here, else as it was stored."""
    log = log_of(store, row)
    if log is not None:
        found = crash_of(log, row.facts or {})
        if found is not None:
            return found
    stored = Crashes(store).of_run(row.id)
    return None if stored is None else note_of(stored)
