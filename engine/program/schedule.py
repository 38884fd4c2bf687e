"""Queues and events: how the ops of a step are spread over the parts of a board, and what still
keeps them in order.

Each part has a queue that it works through in order. Ops on different parts overlap, and only event
edges order them: the consumer waits for the producer's event. The caller of a step is a queue of
its own: it fills the inputs (`BEGIN`), submits the ops in program order, and takes the output
(`END`); for an op that is not asynchronous it waits before it submits the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Union

from engine.program.conflicts import BEGIN, END, Memory, conflicts
from engine.program.ops import Program
from engine.program.placement import DEFAULT, PARTS, Placement, part_of

AsyncOps = Union[str, Collection[str]]  # "all", "none", or ids


@dataclasses.dataclass(frozen=True)
class Edge:
    """`consumer` waits until `producer` of the step `steps` before its own is over."""

    producer: str
    consumer: str
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.producer} → {self.consumer}" + (" of the next step" if self.steps else "")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`queues`: part → its ops in order. `asynchronous`: ops whose submitter does not wait."""

    queues: Mapping[str, tuple[str, ...]]
    edges: frozenset[Edge]
    asynchronous: frozenset[str]

    def without(self, *edges: Edge) -> Schedule:
        """The same with some edges missing. Raises KeyError for an edge it does not have."""
        for edge in edges:
            if edge not in self.edges:
                raise KeyError(f"the schedule has no edge {edge}")
        return dataclasses.replace(self, edges=self.edges - set(edges))

    def with_async(self, program: Program, ops: AsyncOps) -> Schedule:
        """The same with other async flags."""
        return dataclasses.replace(self, asynchronous=async_ids(program, ops))

    def check(self, program: Program) -> None:
        """Raises ValueError when it does not fit the program, or could wait for itself."""
        order = {op.id: index for index, op in enumerate(program.ops, 1)}
        queued = [op_id for queue in self.queues.values() for op_id in queue]
        if sorted(queued) != sorted(order):
            odd = sorted(set(queued) ^ set(order)) or sorted(
                op_id for op_id in order if queued.count(op_id) > 1
            )
            raise ValueError(
                f"schedule: {odd[0]!r} is not in exactly one queue and in the program; derive the "
                "schedule from this program"
            )
        for part, queue in self.queues.items():
            places = [order[op_id] for op_id in queue]
            if places != sorted(places):
                raise ValueError(f"schedule: queue {part} is not in the order of the program")
        order[BEGIN], order[END] = 0, len(order) + 1
        for edge in self.edges:
            unknown = [name for name in (edge.producer, edge.consumer) if name not in order]
            if unknown:
                raise ValueError(f"schedule: edge {edge} names {unknown[0]!r}, which is no op")
            if edge.steps not in (0, 1):
                raise ValueError(f"schedule: edge {edge} spans {edge.steps} steps, expected 0 or 1")
            if not edge.steps and order[edge.producer] >= order[edge.consumer]:
                raise ValueError(f"schedule: edge {edge} points backwards, its wait would not end")
        unknown_ids = sorted(self.asynchronous - set(order))
        if unknown_ids:
            raise ValueError(f"schedule: async op {unknown_ids[0]!r} is not in the program")


def async_ids(program: Program, ops: AsyncOps) -> frozenset[str]:
    """Ids of "all" or "none" of a program's ops, or those given.

    Raises ValueError for an id that is no op of the program.
    """
    ids = [op.id for op in program.ops]
    if isinstance(ops, str):
        if ops not in ("all", "none"):
            raise ValueError(f"async ops are {ops!r}, expected 'all', 'none' or a list of op ids")
        return frozenset(ids if ops == "all" else ())
    unknown = sorted(set(ops) - set(ids))
    if unknown:
        raise ValueError(
            f"async op {unknown[0]!r} is not in this program{program.near(unknown[0])}"
        )
    return frozenset(ops)


def queues_of(program: Program, placement: Placement = DEFAULT) -> dict[str, tuple[str, ...]]:
    """Part → ids of its ops in program order; parts without ops are left out."""
    placed = [(part_of(op, placement), op.id) for op in program.ops]
    queues = {part: tuple(op_id for at, op_id in placed if at == part) for part in PARTS}
    return {part: queue for part, queue in queues.items() if queue}


def derive(
    program: Program,
    placement: Placement = DEFAULT,
    *,
    async_ops: AsyncOps = "all",
    memory: Memory | None = None,
) -> Schedule:
    """The queues of a placement, with as few edges as keep every conflicting pair in order.

    The edges hold whichever ops are asynchronous. `memory` says which buffers share memory.
    """
    queues = queues_of(program, placement)
    before: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for pair in conflicts(program, memory):
        # The pairs of the second step's own are there again: both steps are walked through below.
        for step in (0, 1):
            if step >= pair.steps:
                producer = (pair.first, step - pair.steps)
                before.setdefault((pair.second, step), []).append(producer)
    order = Ordering(program, queues)
    edges: dict[str, set[Edge]] = {}  # by consumer
    for node in order.nodes():
        order.enter(node)
        incoming = edges.setdefault(node[0], set())
        for edge in incoming:
            if edge.steps <= node[1]:
                order.wait(node, (edge.producer, node[1] - edge.steps))
        # The latest producer first: what it waited for itself needs no edge then.
        for producer in sorted(before.get(node, ()), key=order.place, reverse=True):
            if not order.follows(node, producer):
                incoming.add(Edge(producer[0], node[0], node[1] - producer[1]))
                order.wait(node, producer)
        order.leave(node)
    together = frozenset(edge for incoming in edges.values() for edge in incoming)
    return Schedule(queues, together, async_ids(program, async_ops))


class Ordering:
    """Who is over before whom in two consecutive steps, walked through in program order.

    A node is (act, step). `enter` begins one and takes over what its queue and its submission
    order, `wait` adds an event, and `leave` ends it.
    """

    def __init__(
        self,
        program: Program,
        queues: Mapping[str, tuple[str, ...]],
        asynchronous: Collection[str] | None = None,
        steps: int = 2,
    ) -> None:
        self._acts = (BEGIN, *(op.id for op in program.ops), END)
        self._index = {act: index for index, act in enumerate(self._acts)}
        self._part = {op_id: part for part, queue in queues.items() for op_id in queue}
        self._asynchronous = None if asynchronous is None else frozenset(asynchronous)
        self._steps = steps
        # Sets of places as the bits of integers.
        self._before: dict[tuple[str, int], int] = {}
        self._queues: dict[str, int] = {}  # part → what is over when its newest op is
        self._caller = 0  # what is over when the caller goes on

    def nodes(self) -> Iterator[tuple[str, int]]:
        for step in range(self._steps):
            for act in self._acts:
                yield act, step

    def place(self, node: tuple[str, int]) -> int:
        return node[1] * len(self._acts) + self._index[node[0]]

    def enter(self, node: tuple[str, int]) -> None:
        part = self._part.get(node[0])
        self._before[node] = self._caller | (self._queues.get(part, 0) if part else 0)

    def wait(self, node: tuple[str, int], producer: tuple[str, int]) -> None:
        self._before[node] |= self._done(producer)

    def follows(self, node: tuple[str, int], producer: tuple[str, int]) -> bool:
        return bool(self._before[node] >> self.place(producer) & 1)

    def leave(self, node: tuple[str, int]) -> None:
        act = node[0]
        part = self._part.get(act)
        if part is None:
            self._caller = self._done(node)
            return
        self._queues[part] = self._done(node)
        if self._asynchronous is not None and act not in self._asynchronous:
            self._caller |= self._done(node)

    def _done(self, node: tuple[str, int]) -> int:
        return self._before[node] | 1 << self.place(node)
