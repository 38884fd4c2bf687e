"""Taps copy named buffers, a trace records when each op ran. Neither changes a result."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.program.ops import Op
from engine.runtime.state import Buffer, State


class Taps:
    """Copies of what ops wrote, step by step.

    `ops` None taps every op. `values[buffer]` is a list with one array per step; of a KV append the
    rows of the step's positions are copied, not the whole cache.
    """

    def __init__(self, ops: Iterable[str] | None = None) -> None:
        self._ops = None if ops is None else frozenset(ops)
        self.values: dict[str, list[Buffer]] = {}

    def record(self, op: Op, state: State) -> None:
        if self._ops is not None and op.id not in self._ops:
            return
        for name in op.writes:
            value = state[name]
            if op.kind == "kv_append":
                value = value[state["positions"]]
            self.values.setdefault(name, []).append(value.copy())

    def stacked(self, name: str) -> Buffer:
        """All steps of one buffer, one behind the other: (positions, …)."""
        return np.concatenate(self.values[name])


class Trace:
    """Start and end of each op in a ring that is allocated once; the newest `capacity` ops stay."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ValueError(f"trace capacity is {capacity}, expected at least 1")
        self._ring: npt.NDArray[np.int64] = np.zeros((capacity, 4), np.int64)
        self.recorded = 0

    def record(self, step: int, op_index: int, start_ns: int, end_ns: int) -> None:
        self._ring[self.recorded % len(self._ring)] = (step, op_index, start_ns, end_ns)
        self.recorded += 1

    def rows(self) -> npt.NDArray[np.int64]:
        """(n, 4) in order of time: step, op's index in the program, start and end in ns."""
        kept = len(self._ring)
        if self.recorded <= kept:
            return self._ring[: self.recorded].copy()
        return np.roll(self._ring, -(self.recorded % kept), axis=0)
