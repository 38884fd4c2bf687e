"""The deadline passed while the engine was still getting on: too slow, which is no crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "slow", 63, "Too slow for the time given"


def recognise(case: Case) -> Finding | None:
    if case.log.status != "deadline":
        return None
    progress = [event.data for event in case.log.of_kind("progress")]
    last = str(progress[-1].get("message", "")) if progress else ""
    return Finding(
        NAME,
        headline=f"not done in time; it last reported: {last or 'nothing'}",
        sentence=f"The supervisor ended it ({case.log.reason}) without a sign that it hangs",
        remedy="give it more time, or a smaller model",
        kind="slow",
        finding=False,
    )
