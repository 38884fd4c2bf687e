"""Nothing moves: queues that wait for each other, or threads that all wait for locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding
from harness.triage.waiting import cycle, standing, states, waits_of

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "deadlock", 60, "Deadlock"


def recognise(case: Case) -> Finding | None:
    waits = waits_of(case.error)
    if waits:
        ring = cycle(waits)
        if not ring:
            return None
        text = ", ".join(str(wait) for wait in ring)
        return Finding(
            NAME,
            headline=f"deadlock: {text}",
            sentence=f"The queues wait for each other: {text}. {case.error.get('message', '')}",
            remedy="turn one of these edges round: the schedule orders them in both directions",
            op=ring[0].op,
            frames=tuple(f"{wait.who} -> {wait.held_by}" for wait in ring[:3]),
            kind="event cycle",
            facts=tuple(("waits", str(wait)) for wait in waits),
        )
    if case.log.status not in ("hung", "deadline") or not case.stacks:
        return None
    found = states(case.stacks)
    waiting = found and all(state.waits_for_lock for state in found)
    python = [frame for thread in case.threads for frame in thread.frames[:1]]
    if not waiting or not python:
        return None
    where = standing(case.stacks)
    places = tuple(dict.fromkeys(str(frame) for frame in python))
    return Finding(
        NAME,
        headline=f"every thread waits for a lock; the main one in {where}",
        sentence=f"None of {len(found)} threads runs, and each waits for a lock that one of them "
        f"must release; they stand in {', '.join(places[:4])}",
        remedy="take the locks in one order everywhere; stacks.*.log in the run's folder shows all "
        "frames",
        op=case.op,
        frames=(where, *(place for place in places if place != where))[:3],
        kind="locks",
        facts=tuple(("thread", str(state)) for state in found[:16]),
    )
