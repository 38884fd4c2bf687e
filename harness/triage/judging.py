"""From a run's log to what a verdict says of its crash, after every run that did not end well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.case import Case
from harness.triage.deciding import decide
from harness.triage.signature import note_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from harness.jobs.runlog import RunLog
    from harness.verdicts import CrashNote


def crash_of(log: RunLog, facts: Mapping[str, Any] | None = None) -> CrashNote | None:
    """The crash of a run, None for one that ended well, was refused before it began, or was only
    too slow. `facts`: the board's, as plain JSON."""
    case = Case(log, facts or {})
    found = decide(case)
    if found is None or not (found.finding or found.name == "board-reset"):
        return None
    return note_of(case, found)
