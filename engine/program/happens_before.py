"""The static check of a schedule: is every conflicting pair of ops kept in order?

Two ops are in order when a path leads from one to the other: along the queue of a part, along event
edges, and through the caller, who submits in program order, waits for what is not asynchronous, and
begins no step before the last one's output is there (Lamport 1978). A pair without a path may run
either way round. Nothing is repaired here: a finding names what is missing.
"""

from __future__ import annotations

import dataclasses

from engine.program.conflicts import Memory, conflicts
from engine.program.ops import Program
from engine.program.schedule import Edge, Ordering, Schedule

_MEANING = {
    "RAW": "may read {buffer} before it is written",
    "WAR": "may overwrite {buffer} before it is read",
    "WAW": "may write {buffer} too early and be overwritten",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Two acts of a step, or of two consecutive ones, that nothing keeps in order."""

    hazard: str  # RAW, WAR or WAW
    first: str  # must be over …
    second: str  # … before this one begins
    buffer: str
    shared_with: str | None  # the first's buffer, when the two only share memory
    missing: Edge

    def __str__(self) -> str:
        shared = f", which shares memory with {self.shared_with}" if self.shared_with else ""
        step = " of the next step" if self.missing.steps else ""
        what = _MEANING[self.hazard].format(buffer=self.buffer + shared)
        return (
            f"{self.hazard}: {self.second}{step} {what} by {self.first}; no queue or event orders "
            f"them, the edge {self.missing} is missing"
        )


def check(program: Program, schedule: Schedule, memory: Memory | None = None) -> list[Finding]:
    """All conflicting pairs that the schedule leaves unordered, in program order.

    `memory` says which buffers share memory. Raises ValueError for a schedule of another program.
    """
    schedule.check(program)
    order = Ordering(program, schedule.queues, schedule.asynchronous)
    edges: dict[str, list[Edge]] = {}
    for edge in schedule.edges:
        edges.setdefault(edge.consumer, []).append(edge)
    for node in order.nodes():
        order.enter(node)
        for edge in edges.get(node[0], ()):
            if edge.steps <= node[1]:
                order.wait(node, (edge.producer, node[1] - edge.steps))
        order.leave(node)
    return [
        Finding(
            pair.hazard,
            pair.first,
            pair.second,
            pair.second_buffer,
            pair.first_buffer if pair.first_buffer != pair.second_buffer else None,
            Edge(pair.first, pair.second, pair.steps),
        )
        for pair in conflicts(program, memory)
        if not order.follows((pair.second, 1), (pair.first, 1 - pair.steps))
    ]
