"""Taps copy named buffers, a trace records when each op ran. Neither changes a result."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.program.ops import Op
from engine.runtime.state import Buffer, State


class Taps:
    """Copies of what ops wrote, step by step.

    `ops` None taps every op; a fused op is tapped for any of its parts. `values[buffer]` is a list
    with one array per step; of a KV append the slots of the step's tokens are copied, not the whole
    cache.
    """

    def __init__(self, ops: Iterable[str] | None = None) -> None:
        self._ops = None if ops is None else frozenset(ops)
        self.values: dict[str, list[Buffer]] = {}

    def record(self, op: Op, state: State) -> None:
        if not self.wants(op):
            return
        for name in op.writes:
            value = state[name]
            if name in op.appends:
                value = value[state[op.slots]]
            self.values.setdefault(name, []).append(np.array(value))

    def wants(self, op: Op) -> bool:
        """Whether `record` copies anything of this op."""
        ops = self._ops
        return ops is None or op.id in ops or any(part.id in ops for part in op.parts)

    def stacked(self, name: str) -> Buffer:
        """All steps of one buffer, one behind the other: (positions, …)."""
        return np.concatenate(self.values[name])


class Trace:
    """Start and end of each op in a ring that is allocated once; the newest `capacity` ops stay.

    All executors fill the same rows; which part of the board an op ran on is in the program's
    placement, by the op's index.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ValueError(f"trace capacity is {capacity}, expected at least 1")
        self._ring: npt.NDArray[np.int64] = np.zeros((capacity, 4), np.int64)
        self.recorded = 0

    @property
    def ring(self) -> npt.NDArray[np.int64]:
        """The memory itself, (capacity, 4), for an executor that fills it and sets `recorded`."""
        return self._ring

    def record(self, step: int, op_index: int, start_ns: int, end_ns: int) -> None:
        self._ring[self.recorded % len(self._ring)] = (step, op_index, start_ns, end_ns)
        self.recorded += 1

    def extend(self, rows: npt.NDArray[np.int64]) -> None:
        """Append rows (n, 4) that were recorded elsewhere, oldest first, as `rows()` gives them.

        Raises ValueError for another shape.
        """
        rows = np.asarray(rows, np.int64)
        if rows.ndim != 2 or rows.shape[1] != 4:
            raise ValueError(f"trace rows have shape {rows.shape}, expected (n, 4)")
        kept = len(self._ring)
        newest = rows[-kept:]
        first = self.recorded + len(rows) - len(newest)
        self._ring[(first + np.arange(len(newest))) % kept] = newest
        self.recorded += len(rows)

    def rows(self) -> npt.NDArray[np.int64]:
        """(n, 4) in order of time: step, op's index in the program, start and end in ns."""
        kept = len(self._ring)
        if self.recorded <= kept:
            return self._ring[: self.recorded].copy()
        return np.roll(self._ring, -(self.recorded % kept), axis=0)
