"""The board ends large processes by policy, and said so: Android's low memory killer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.case import memory_trend
from harness.triage.classes.out_of_memory import memory_facts
from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "policy-kill", 21, "Ended by the board's policy"


def recognise(case: Case) -> Finding | None:
    said = case.note("policy") if case.signal in ("SIGKILL", "SIGTERM") else None
    if said is None:
        return None
    trend = memory_trend(case.log.samples)
    reason = f": {said.detail}" if said.detail else ""
    return Finding(
        NAME,
        headline=f"ended by the board's low memory killer{reason}",
        sentence=f"The low memory killer of the board ended it: {said.line}; {trend}",
        remedy="map the weights instead of reading them, keep the arena small, or run the engine "
        "as a foreground or system service that this policy spares",
        signal=case.signal,
        kind="lowmemorykiller",
        facts=(("record", said.line), ("memory", trend), *memory_facts(case)),
    )
