"""Which pairs of ops must not run in either order: they touch the same memory, and one writes.

Besides the ops of the program a step has two of its caller's own acts, because they touch buffers
too: `BEGIN` fills the inputs, `END` takes the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from engine.program.ops import Op, Program

BEGIN, END = "step.begin", "step.end"
# Buffer → (first byte, byte behind the last) in memory that buffers share. Those that are not in
# the map lie alone.
Memory = Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Access:
    """What one act of a step touches. `parts` of fused ops may write buffers nobody else sees."""

    id: str
    reads: frozenset[str]
    writes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Conflict:
    """`first` must be over before `second` begins, which is `steps` (0 or 1) steps later.

    `hazard` is RAW, WAR or WAW: what second does, after what first did. When the two buffers have
    different names they share memory.
    """

    hazard: str
    first: str
    second: str
    steps: int
    first_buffer: str
    second_buffer: str


def accesses(program: Program) -> tuple[Access, ...]:
    """All acts of one step in the order that the program means: BEGIN, the ops, END."""
    return (
        Access(BEGIN, frozenset(), frozenset(program.inputs)),
        *(_access(op) for op in program.ops),
        Access(END, frozenset({program.output}), frozenset()),
    )


def _access(op: Op) -> Access:
    inside = {name for part in op.parts for name in part.writes}
    return Access(op.id, frozenset(op.reads), frozenset(op.writes) | inside)


def conflicts(program: Program, memory: Memory | None = None) -> list[Conflict]:
    """Every conflicting pair within a step and between two consecutive ones.

    Pairs that others imply are left out. Every act waits for its own of the step before, so a pair
    in the order of the program is ordered across steps where it is within one; what one step writes
    and the next reads was written again in between, caches excepted; and between acts of steps
    further apart lies a step that repeats one of the two.
    """
    acts = accesses(program)
    order = {act.id: index for index, act in enumerate(acts)}
    users: dict[str, list[tuple[str, bool]]] = {}  # buffer → (act, whether it writes)
    for act in acts:
        for name in act.writes:
            users.setdefault(name, []).append((act.id, True))
        for name in act.reads:
            users.setdefault(name, []).append((act.id, False))
    found: dict[tuple[str, str, str], Conflict] = {}
    for name, other in _overlapping(sorted(users), memory or {}):
        for first, first_writes in users[name]:
            for second, second_writes in users[other]:
                if first == second or not (first_writes or second_writes):
                    continue
                hazard = ("WAW" if second_writes else "RAW") if first_writes else "WAR"
                steps = int(order[first] > order[second])
                if steps and hazard == "RAW" and name not in program.caches:
                    continue
                key = (first, second, hazard)
                if key not in found or name == other:
                    found[key] = Conflict(hazard, first, second, steps, name, other)
    return sorted(found.values(), key=lambda c: (c.steps, order[c.second], order[c.first]))


def _overlapping(names: list[str], memory: Memory) -> Iterator[tuple[str, str]]:
    """Each buffer with itself, and every two buffers whose memory overlaps, both ways round."""
    for name in names:
        yield name, name
    placed = sorted((memory[name][0], memory[name][1], name) for name in names if name in memory)
    open_until: list[tuple[int, str]] = []
    for start, stop, name in placed:
        open_until = [(end, other) for end, other in open_until if end > start]
        for _, other in open_until:
            yield name, other
            yield other, name
        open_until.append((stop, name))
