"""Signals that say what they mean themselves: an abort, an arithmetic trap, a request to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding
from harness.triage.native import frame_keys, place

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "fatal-signal", 70, "Fatal signal"
MEANINGS = {
    "SIGFPE": "an arithmetic trap",
    "SIGABRT": "it ended itself (abort)",
    "SIGTRAP": "a trap that the compiler put there: what must never be reached was",
    "SIGTERM": "it was asked to end by something else than the supervisor",
    "SIGXCPU": "it used more CPU time than its limit allows",
    "SIGXFSZ": "it wrote a larger file than its limit allows",
    "SIGSYS": "a system call that a filter of the board forbids",
}


def recognise(case: Case) -> Finding | None:
    if not case.signal or case.signal == "SIGKILL":
        return None
    meaning = MEANINGS.get(case.signal, "ended by a signal")
    record = case.record
    why = f"; Python says: {case.fatal.what}" if case.fatal is not None else ""
    if record is not None and record.sender is None:
        meaning += f", in {place(case)}"
    elif record is not None and record.sender not in (record.process, None):
        why += f"; process {record.sender} sent it"
    return Finding(
        NAME,
        headline=meaning,
        sentence=meaning + why,
        remedy="read engine.*.log in the run's folder: it ends with the Python frames",
        signal=case.signal,
        code=case.code,
        op=case.op,
        frames=frame_keys(case),
        kind=case.signal,
        facts=tuple(("Python frame", frame) for frame in case.python_frames()),
    )
