"""What is left: SIGKILL without any evidence. Never called out of memory: phones and some boards
end large processes by policy and leave no line, and people do so too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.case import memory_trend
from harness.triage.classes.out_of_memory import memory_facts
from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "killed", 90, "Killed, cause unknown"


def recognise(case: Case) -> Finding | None:
    if case.signal != "SIGKILL":
        return None
    trend = memory_trend(case.log.samples)
    kernel = case.evidence.get("kernel")
    told = kernel if isinstance(kernel, dict) else {}
    readable = (
        "its lines could be read and name no kill" if told.get("source") else "could not be read"
    )
    why = str(told.get("why") or "")
    return Finding(
        NAME,
        headline="killed, cause unknown",
        sentence=f"killed, cause unknown; {trend}; the kernel's log: {readable}",
        remedy="look at the board's kernel log and memory limits (dmesg, memory.events), and who "
        "else may end processes there",
        signal=case.signal,
        op=case.op,
        kind="no evidence",
        facts=(
            ("memory", trend),
            *memory_facts(case),
            ("kernel log", readable + (f" ({why})" if why else "")),
        ),
    )
