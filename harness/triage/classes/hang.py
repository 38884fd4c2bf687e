"""The engine was ended for its silence: it spins, is stuck in a driver, or waits for something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding
from harness.triage.waiting import standing, states

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "hang", 62, "Hang"


def recognise(case: Case) -> Finding | None:
    stuck = case.error.get("kind") == "ExecutorStuck"
    looked = case.log.status == "deadline" and case.stacks
    if not (stuck or case.log.status == "hung" or looked):
        return None
    npu = case.note("npu")
    found = states(case.stacks)
    driver = [state for state in found if state.state == "D"]
    busy = [state for state in found if state.busy]
    where = standing(case.stacks) or "an unknown place"
    if npu is not None:
        kind, words = "npu", f"the NPU's driver gave up waiting: {npu.detail}"
    elif driver:
        at = driver[0].wchan or "the kernel"
        kind, words = f"driver {at}", f"stuck in {at}, which no signal ends"
    elif busy:
        kind, words = "spin", f"{len(busy)} thread(s) run and get nowhere, in {where}"
    else:
        kind, words = "waiting", f"it waits, in {where}"
    hung = case.note("hung")
    facts = [("thread", str(state)) for state in found[:16]]
    facts += [("kernel", note.line) for note in (npu, hung) if note is not None]
    remedy = "read stacks.*.log in the run's folder: where each of its threads stood"
    if npu is not None:
        remedy = "check the board's health first: after an NPU was reset the next runs fail too"
    return Finding(
        NAME,
        headline=words,
        sentence=f"{words} ({case.log.reason or case.error.get('message', '')})",
        remedy=remedy,
        op=case.op,
        frames=(where,),
        kind=kind,
        facts=tuple(facts),
    )
