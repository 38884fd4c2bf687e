"""Mistakes in how an async executor keeps its ops in order, planted to see whether they are found.

engine.units.faulty reads them from the environment and explains them; here they become what the
executor does otherwise. Each sits at one op and shows only while that op is asynchronous (as are
all others that the fault names): while its submitter waits for it, nothing runs ahead of it. A
mistake is made with the fault's probability in each step, and the op is late in those steps, so
that it shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.program.conflicts import Memory, conflicts
from engine.program.ops import Program
from engine.program.schedule import Schedule

if TYPE_CHECKING:
    from engine.units.faulty import Fault

LATE_S = 0.02  # longer than an op of a small model takes on a busy machine


@dataclasses.dataclass(frozen=True)
class Mistakes:
    """What goes wrong in one step. Empty: nothing does.

    lost: (producer, consumer) of edges that nobody waits for.
    moved: ops in the queue of another part, and `after` which op each of them waits for there.
    held_back, late: ops that begin late, and whose results come late.
    stray: op → (source, target) of a write by another one that comes after its own.
    """

    lost: frozenset[tuple[str, str]] = frozenset()
    moved: Mapping[str, str] = dataclasses.field(default_factory=dict)
    after: Mapping[str, str] = dataclasses.field(default_factory=dict)
    held_back: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    stray: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)


NONE = Mistakes()


class Planted:
    """The faults of one program. Raises ValueError for one that cannot be planted where it says,
    naming an op where it can."""

    def __init__(
        self, faults: Sequence[Fault], program: Program, schedule: Schedule, memory: Memory
    ) -> None:
        places = _Places(program, schedule, memory)
        self._found = [(fault, _mistake(places, fault)) for fault in faults]

    def begin(self, asynchronous: frozenset[str]) -> Mistakes:
        """What goes wrong in the next step."""
        made = NONE
        for fault, mistake in self._found:
            chosen = fault.chance.random() < fault.value  # drawn whatever the flags are
            if chosen and asynchronous.issuperset(fault.ops) and not asynchronous & fault.unless:
                made = _together(made, mistake)
        return made


def _together(one: Mistakes, other: Mistakes) -> Mistakes:
    return Mistakes(
        one.lost | other.lost,
        {**one.moved, **other.moved},
        {**one.after, **other.after},
        one.held_back | other.held_back,
        one.late | other.late,
        {**one.stray, **other.stray},
    )


class _Places:
    """What a program and its schedule offer to mistakes at one op; None where it offers nothing."""

    def __init__(self, program: Program, schedule: Schedule, memory: Memory) -> None:
        self.program, self.schedule = program, schedule
        self.part = {op: part for part, queue in schedule.queues.items() for op in queue}
        self._pairs = conflicts(program, memory)

    def edge(self, op: str) -> Mistakes | None:
        """Nobody waits for its event, and its result is late."""
        lost = {(edge.producer, edge.consumer) for edge in self.schedule.edges}
        lost = {pair for pair in lost if pair[0] == op}
        return Mistakes(lost=frozenset(lost), late=frozenset({op})) if lost else None

    def queue(self, op: str) -> Mistakes | None:
        """It waits for what is before it, but what comes after it on its own part does not wait."""
        own = self.schedule.queues[self.part[op]]
        at = own.index(op)
        others = [part for part in self.schedule.queues if part != self.part[op]]
        # A unit may keep scratch for these, on the one thread of their part.
        heavy = {part.kind for part in self.program.op(op).parts} & {"linear", "attention"}
        if heavy or not others or at + 1 == len(own):
            return None
        after = {op: own[at - 1]} if at else {}
        return Mistakes(moved={op: others[0]}, after=after, late=frozenset({op}))

    def reuse(self, op: str) -> Mistakes | None:
        """It begins late, and who overwrites what it reads does not wait for it."""
        writers = {
            pair.second
            for pair in self._pairs
            if pair.first == op and pair.hazard == "WAR" and pair.first_buffer != pair.second_buffer
        }
        lost = {
            (edge.producer, edge.consumer)
            for edge in self.schedule.edges
            if edge.producer == op and edge.consumer in writers
        }
        return Mistakes(lost=frozenset(lost), held_back=frozenset({op})) if lost else None

    def stray(self, op: str) -> Mistakes | None:
        """The last of its writes lands where the next op's result lies, once that is there."""
        ops = self.program.ops
        at = next(index for index, other in enumerate(ops) if other.id == op)
        if at + 1 == len(ops) or self.part[ops[at + 1].id] == self.part[op]:
            return None
        own, target = (
            [name for name in one.writes if name not in self.program.caches]
            for one in ops[at : at + 2]
        )
        if not own or not target:
            return None
        return Mistakes(stray={ops[at + 1].id: (own[0], target[0])})


def _mistake(places: _Places, fault: Fault) -> Mistakes:
    find, needed = {
        "drop-edge": (places.edge, "whose event another part waits for"),
        "wrong-queue": (places.queue, "that is no product and has a successor on its own part"),
        "early-reuse": (places.reuse, "whose input is overwritten by an op that waits for it"),
        "undeclared-write": (places.stray, "that is followed by one of another part"),
    }[fault.kind]
    found = find(fault.op)
    if found is None:
        fitting = [op.id for op in places.program.ops if find(op.id) is not None]
        raise ValueError(
            f"ENGINE_FAULT: {fault.kind} cannot be planted in {fault.op}; expected an op {needed}"
            + (f", such as {', '.join(fitting[:3])}" if fitting else "; this program has none")
        )
    return found
