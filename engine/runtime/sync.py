"""The sync executor: op by op, each finished before the next; where taps and traces are taken."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from engine.program.ops import Op, Program
from engine.program.placement import part_of
from engine.runtime.state import Buffer, NonFinite, State
from engine.runtime.trace import Taps, Trace
from engine.units.base import Unit, prepare

__all__ = ["NonFinite", "SyncExecutor", "checked", "require_finite"]


class SyncExecutor:
    """Runs a program on one unit. A buffer is dropped after its last reader."""

    def __init__(self, program: Program, unit: Unit, trace: Trace | None = None) -> None:
        self.program, self.unit, self.trace = program, unit, trace
        self.step = 0
        self.parts = tuple(part_of(op) for op in program.ops)
        readers = Counter(name for op in program.ops for name in op.reads)
        kept = {program.output, *program.inputs, *program.caches}
        self._drops: list[tuple[str, ...]] = []
        for op in program.ops:
            readers.subtract(op.reads)
            done = [name for name in set(op.reads) - kept if readers[name] == 0]
            done += [name for name in set(op.writes) - kept if readers[name] == 0]
            self._drops.append(tuple(done))
        self._checked = [checked(op) for op in program.ops]
        prepare(unit, program)

    def run(self, state: State, taps: Taps | None = None) -> Buffer:
        """One step. `state` holds inputs and caches; returns the logits (R, V).

        Raises NonFinite naming the first op whose output is not finite.
        """
        trace = self.trace
        for index, op in enumerate(self.program.ops):
            start = time.perf_counter_ns() if trace else 0
            try:
                self.unit.execute(op, state)
            except NonFinite as error:
                error.step = self.step  # which a unit does not count
                raise
            if trace:
                trace.record(self.step, index, start, time.perf_counter_ns())
            for name in self._checked[index]:
                require_finite(self.step, op, state[name])
            if taps:
                taps.record(op, state)
            for name in self._drops[index]:
                del state[name]
        self.step += 1
        return state[self.program.output]

    def close(self) -> None:
        """Nothing to end: it has no threads of its own."""

    def run_op(self, op: Op, state: State) -> None:
        """One op alone, on whatever `state` holds: how an op is compared with its reference."""
        self.unit.execute(op, state)


def checked(op: Op) -> tuple[str, ...]:
    """The buffers an op makes numbers in: what it appends or selects was looked at before."""
    if op.kind == "select":
        return ()
    return tuple(name for name in op.writes if name not in op.appends)


def require_finite(step: int, op: Op, values: Buffer) -> None:
    """Raises NonFinite for values that are not."""
    # A dot product with itself is finite if every value is, and costs a tenth of isfinite; values
    # beyond the square root of the range overflow it, so a hit is looked at properly.
    flat = values.reshape(-1)
    if np.isfinite(np.dot(flat, flat)):
        return
    finite = np.isfinite(flat)
    if not finite.all():
        nans = int(np.isnan(flat).sum())
        count = int(flat.size - np.count_nonzero(finite))
        kind = "NaN" if nans == count else "infinite" if not nans else "NaN or infinite"
        error = NonFinite(step, op, count, flat.size, kind)
        error.evidence = {"kind": kind, "nan": nans, "infinite": count - nans}
        error.evidence["first at"] = int(np.flatnonzero(~finite)[0])
        if finite.any():
            rest = flat[finite]
            error.evidence["range of the rest"] = [float(rest.min()), float(rest.max())]
        raise error
