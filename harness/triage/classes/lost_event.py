"""A queue waits for an op that is over, or that nobody has: its end was never told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding
from harness.triage.waiting import waits_of

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "lost-event", 61, "Lost event"


def recognise(case: Case) -> Finding | None:
    waits = waits_of(case.error)
    lost = [wait for wait in waits if not wait.held_by]
    if not lost:
        return None
    first = lost[0]
    return Finding(
        NAME,
        headline=f"lost event: {first.who} waits for {first.op}, whose end nobody will tell",
        sentence=f"{first}: no queue has {first.op} any more, so its event was lost. "
        f"{case.error.get('message', '')}",
        remedy=f"look at what signals the end of {first.op}: its queue dropped it, or it ended "
        "without being counted",
        op=first.op,
        frames=tuple(f"{wait.who} -> {wait.op}" for wait in lost[:3]),
        kind="lost event",
        facts=tuple(("waits", str(wait)) for wait in waits),
    )
