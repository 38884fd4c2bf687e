"""The board went down: whatever the engine did, its end says nothing about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "board-reset", 10, "The board was reset"


def recognise(case: Case) -> Finding | None:
    if case.log.status != "board-reset":
        return None
    start = next((e.data for e in case.log.of_kind("run-start")), {})
    left = case.evidence.get("pstore") or ()
    facts = [("boot_id at the start", str(start.get("boot_id") or "unknown"))]
    facts += [("pstore", str(item)) for item in left]
    return Finding(
        NAME,
        headline="the board was restarted during the run",
        sentence=f"The board was restarted during the run: {case.log.reason}.",
        remedy="look at the board's power supply, its temperature and /sys/fs/pstore before the "
        "engine: `harness boards why` tells what was done about it",
        kind="boot_id changed",
        facts=tuple(facts),
        finding=False,
    )
