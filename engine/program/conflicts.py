"""Which pairs of ops must not run in either order: they touch the same memory, and one writes.

Besides the ops of the program a step has two of its caller's own acts, because they touch buffers
too: `BEGIN` fills the inputs, `END` takes the output.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterator, Mapping

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


@dataclasses.dataclass(frozen=True)
class _Use:
    """One act touching one buffer; `at` is the act's place in the step."""

    at: int
    act: str
    buffer: str
    writes: bool


def conflicts(program: Program, memory: Memory | None = None) -> list[Conflict]:
    """The conflicting pairs within a step and between two consecutive ones.

    Pairs that others imply are left out: when an act between the two writes memory of both, it is
    in conflict with either, and so orders them. Every act waits for its own of the step before, so
    acts of steps further apart are ordered as well.
    """
    places = memory or {}
    users = _users(program)
    found: dict[tuple[str, str, str], Conflict] = {}
    for name, near in _overlapping(users, places).items():
        together = sorted((use for other in near for use in users[other]), key=lambda use: use.at)
        for use in users[name]:
            for hazard, other, steps in _next_conflicts(use, together, places):
                pair = Conflict(hazard, use.act, other.act, steps, name, other.buffer)
                key = (use.act, other.act, hazard)
                if key not in found or name == other.buffer:
                    found[key] = pair
    order = {act.id: index for index, act in enumerate(accesses(program))}
    return sorted(found.values(), key=lambda c: (c.steps, order[c.second], order[c.first]))


def _next_conflicts(
    use: _Use, together: list[_Use], memory: Memory
) -> Iterator[tuple[str, _Use, int]]:
    """Who touches the memory of `use` after it until all of it is written again: hazard, who, how
    many steps later. `together` are the uses of that memory in the order of a step."""
    start, stop = _place(use.buffer, memory)
    open_parts = [(start, stop)]  # not written again yet
    behind = bisect.bisect_right([other.at for other in together], use.at)
    before = bisect.bisect_left([other.at for other in together], use.at)
    rest = [(other, 0) for other in together[behind:]] + [(other, 1) for other in together[:before]]
    at = (use.at, 0)
    written: list[tuple[int, int]] = []
    for other, steps in rest:
        if (other.at, steps) != at:  # what one act writes hides only what comes after it
            at, open_parts, written = (other.at, steps), _without(open_parts, written), []
            if not open_parts:
                return
        first, last = _place(other.buffer, memory)
        if any(low < last and first < high for low, high in open_parts):
            if use.writes or other.writes:
                hazard = ("WAW" if other.writes else "RAW") if use.writes else "WAR"
                yield hazard, other, steps
            if other.writes:
                written.append((first, last))


def _without(parts: list[tuple[int, int]], written: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of the ranges `parts` where `written` ranges are taken away."""
    for first, last in written:
        parts = [
            piece
            for low, high in parts
            for piece in ((low, min(high, first)), (max(low, last), high))
            if piece[0] < piece[1]
        ]
    return parts


def _place(name: str, memory: Memory) -> tuple[int, int]:
    """A buffer outside `memory` overlaps itself alone, so any range of its own will do."""
    return memory.get(name, (0, 1))


def _users(program: Program) -> dict[str, list[_Use]]:
    users: dict[str, list[_Use]] = {}
    for at, act in enumerate(accesses(program)):
        for name in act.writes:
            users.setdefault(name, []).append(_Use(at, act.id, name, True))
        for name in act.reads:
            users.setdefault(name, []).append(_Use(at, act.id, name, False))
    return users


def _overlapping(names: Collection[str], memory: Memory) -> dict[str, list[str]]:
    """Each buffer → itself and those whose memory overlaps its own."""
    found = {name: [name] for name in sorted(names)}
    placed = sorted((*memory[name], name) for name in found if name in memory)
    live: list[tuple[int, str]] = []
    for start, stop, name in placed:
        live = [(end, other) for end, other in live if end > start]
        for _, other in live:
            found[name].append(other)
            found[other].append(name)
        live.append((stop, name))
    return found


def require_lives(program: Program, memory: Memory) -> None:
    """Raises ValueError for memory that loses a buffer even in the order of the program: one is
    written over before its last reader."""
    users = _users(program)
    for name, near in _overlapping(users, memory).items():
        begins = min(use.at for use in users[name])
        readers = [use for use in users[name] if not use.writes]
        for other in near[1:]:
            for use in users[other]:
                late = [reader for reader in readers if reader.at >= use.at]
                if use.writes and use.at >= begins and late:
                    raise ValueError(
                        f"memory: {use.act} writes where {name} lies, which {late[0].act} still "
                        "reads; give one of them another place"
                    )
