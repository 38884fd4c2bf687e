"""ThreadSanitizer named two accesses without an order between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "data-race", 39, "Data race"


def recognise(case: Case) -> Finding | None:
    report = case.sanitizer
    if report is None or report.tool != "thread" or not case.own_exit:
        return None
    sides = [
        f"{'an earlier ' if side.previous else 'a '}{side.kind} of {side.size} bytes in "
        f"{side.frames[0] if side.frames else 'an unknown place'}"
        for side in report.accesses[:2]
    ]
    words = " against ".join(sides) or report.what
    return Finding(
        NAME,
        headline=f"{report.what}: {words}",
        sentence=f"The thread sanitiser reports a {report.what}: {words}",
        remedy="order the two by an event; `harness bisect race` finds ops that race",
        signal=case.signal,
        op=case.op,
        frames=tuple(
            f"{side.frames[0].name} {side.frames[0].place}"
            for side in report.accesses[:2]
            if side.frames
        ),
        kind=report.what,
        facts=tuple(
            ("frame", str(frame)) for side in report.accesses[:2] for frame in side.frames[:8]
        ),
    )
