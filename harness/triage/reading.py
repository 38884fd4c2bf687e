"""Runs of the results store as cases: what a run left here, and what the store knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.spool import EVENTS_NAME
from harness.errors import HarnessError
from harness.jobs.runlog import RunLog
from harness.store import raw
from harness.store.crashes import Crashes, note_of
from harness.triage.case import Case
from harness.triage.judging import crash_of

if TYPE_CHECKING:
    from harness.store import RunRow, Store
    from harness.verdicts import CrashNote

LOST = {"board-lost": "lost", "board-reset": "board-reset"}  # kinds of trouble → status of a log


def log_of(
    store: Store, row: RunRow, kind: str | None = None, found: str | None = None
) -> RunLog | None:
    """What the run left in the store's folder; None when nothing came from the board.

    `kind` and `found` are the board's trouble, where the store does not know it yet. Raises
    HarnessError for events that cannot be read.
    """
    folder = store.raw_root / row.id
    path = folder / EVENTS_NAME
    if not path.is_file():
        return None
    events = list(raw.events(path))
    end = events[-1].data if events and events[-1].kind == "run-end" else {}
    kind, found = kind or row.error_kind or "", found or row.headline or ""
    status = LOST.get(kind, str(end.get("status") or "lost"))
    reason = found if kind in LOST and found else str(end.get("reason") or found)
    return RunLog(row.id, events, folder, status, reason)


def reset_of(store: Store, run_id: str, found: str) -> CrashNote | None:
    """What is known of a run that ended by its board's restart; `found` says how that is known."""
    row = store.run(run_id)
    try:
        log = log_of(store, row, "board-reset", found)
    except HarnessError:  # the restart took what would tell
        return None
    return None if log is None else crash_of(log, row.facts or {})


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
