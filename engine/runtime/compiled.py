"""The compiled executor: a whole step as one list of native commands, run by a team of threads.

Pointers are prepared once. A step is one call into the library, with no Python between ops; where
taps or planted faults want to look in between, the same commands run op by op, so nothing changes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.native.library import ROWS_R, Cache, Command, Step
from engine.native.lowering import cache_structure
from engine.program.ops import Op, Program
from engine.program.placement import part_of
from engine.program.shapes import buffer_shapes
from engine.runtime.arena import Plan, Span, plan
from engine.runtime.state import Buffer, NonFinite, State
from engine.runtime.sync import checked, require_finite
from engine.runtime.trace import Taps, Trace
from engine.units.base import prepare
from engine.units.native import Native, finish, step_of

MOST_ROWS = 128  # tokens of one step, as prefill runs


class CompiledExecutor:
    """Runs a program on the native unit. `unit` may be the faulty one around it: ops with faults
    then run by themselves between the native commands."""

    def __init__(
        self, program: Program, unit: Any, trace: Trace | None = None, rows: int = MOST_ROWS
    ) -> None:
        self.program, self.unit, self.trace = program, unit, trace
        self.step = 0
        self._recording = False
        self._native: Native = unit if isinstance(unit, Native) else unit.unit
        prepare(unit, program)
        self.parts = tuple(part_of(op) for op in program.ops)
        self._faults = _faulty_ops(program, unit)
        self._rows = rows
        self._team = self._native.team()
        self._bound: tuple[Any, ...] = ()
        self._place: _Arena | None = None
        self._commands: Any = None
        self._firsts: list[int] = []  # op → its first command
        # Inputs are copied to where the commands look for them: asking numpy for an address takes
        # longer than that.
        self._inputs = {name: np.zeros(rows, np.int64) for name in program.inputs}
        self._step = step_of(self._inputs)

    def run(self, state: State, taps: Taps | None = None) -> Buffer:
        """One step. `state` holds inputs and caches; returns the logits (R, V), a copy.

        Raises NonFinite or CacheOverflow naming the first op with bad numbers, KeyError for an
        input that is missing, ValueError for more rows than the executor was made for.
        """
        rows = max(len(state["tokens"]), len(state["rows"]))
        if rows > self._rows:
            raise ValueError(f"a step of {rows} rows, expected at most {self._rows}")
        self._bind(state)
        step = self._step_of(state)
        self._record(True)
        try:
            if taps is None and not self._faults:
                self._run_whole(state, step)
            else:
                for index, op in enumerate(self.program.ops):
                    self._run_alone(index, op, state, step, taps)
        finally:
            self._record(False)
        self.step += 1
        return self._view(self.program.output, step).copy()

    def run_op(self, op: Op, state: State) -> None:
        """One op alone, on whatever `state` holds."""
        self.unit.execute(op, state)

    def close(self) -> None:
        """Nothing to end: the team belongs to the unit."""

    def _step_of(self, state: State) -> Step:
        tokens, rows = len(state["tokens"]), len(state["rows"])
        for name, array in self._inputs.items():
            values, wanted = state[name], rows if name == "rows" else tokens
            if len(values) != wanted:
                raise ValueError(f"input {name} has {len(values)} rows, expected {wanted}")
            array[:wanted] = values
        self._step.tokens, self._step.rows = tokens, rows
        return self._step

    def _record(self, on: bool) -> None:
        """Let the commands that follow fill the trace, or no longer."""
        if self.trace is None or on == self._recording:
            return
        self._recording = on
        if on:
            self._team.trace_into(self.trace, self.step)
        else:
            self.trace.recorded = self._team.recorded
            self._team.trace_into(None, 0)

    def _run_whole(self, state: State, step: Step) -> None:
        first = 0
        while first < len(self._commands) and self._team.run(self._commands, step, first):
            index = step.bad_op
            self._examine(index, state, step)
            first = self._firsts[index + 1]  # what was bad stayed inside the op

    def _examine(self, index: int, state: State, step: Step) -> None:
        """An op stopped at bad numbers. Raises NonFinite or CacheOverflow unless it writes none."""
        op = self.program.ops[index]
        self._record(False)
        within = (self._firsts[index], self._firsts[index + 1])
        try:
            finish(op, self._team, self._commands, step, state, within)
        except NonFinite as error:
            error.step = self.step
            raise
        for name in checked(op):
            require_finite(self.step, op, self._view(name, step))
        self._record(True)

    def _run_alone(self, index: int, op: Op, state: State, step: Step, taps: Taps | None) -> None:
        if op.id in self._faults:
            self._run_faulty(index, op, state, step)
        else:
            first, behind = self._firsts[index], self._firsts[index + 1]
            if self._team.run(self._commands, step, first, behind - first):
                self._examine(index, state, step)
        if taps is not None and taps.wants(op):
            taps.record(op, {**state, **{name: self._view(name, step) for name in self._made(op)}})

    def _run_faulty(self, index: int, op: Op, state: State, step: Step) -> None:
        """As the sync executor does it; then what it wrote goes where the commands look for it."""
        given = {**state, **{name: self._view(name, step) for name in self._known(op)}}
        self._record(False)
        start = time.perf_counter_ns()
        try:
            self.unit.execute(op, given)
        except NonFinite as error:
            error.step = self.step
            raise
        if self.trace is not None:
            self.trace.record(self.step, index, start, time.perf_counter_ns())
        for name in checked(op):
            require_finite(self.step, op, given[name])
        for name in self._made(op):
            self._view(name, step)[...] = given[name]
        self._record(True)

    def _known(self, op: Op) -> list[str]:
        outside = {*self.program.inputs, *self.program.caches}
        return [name for name in op.reads if name not in outside]

    def _made(self, op: Op) -> list[str]:
        return [name for name in op.writes if name not in op.appends]

    def _view(self, name: str, step: Step) -> npt.NDArray[np.float32]:
        """A buffer's rows of this step, where they lie."""
        if self._place is None:
            raise RuntimeError("nothing ran yet")
        return self._place.view(name, step.rows if name in self._place.selected else step.tokens)

    def _bind(self, state: State) -> None:
        """Make the commands for these caches, unless they are made already."""
        caches = tuple(state[name] for name in self.program.caches)
        if len(caches) == len(self._bound) and all(a is b for a, b in zip(caches, self._bound)):
            return
        place = _Arena(self.program, self._native, self._rows, state)
        commands: list[Command] = []
        self._firsts = []
        for index, op in enumerate(self.program.ops):
            self._firsts.append(len(commands))
            made = self._native.lowering.lower(op, place, index)
            if op.kind != "select" and any(name in place.selected for name in op.reads):
                for command in made:
                    command.flags |= ROWS_R
            commands += made
        self._firsts.append(len(commands))
        self._commands = (Command * len(commands))(*commands)
        self._place, self._bound = place, caches
        self._team.reserve(self._commands, self._rows)


def _faulty_ops(program: Program, unit: Any) -> Collection[str]:
    """Ids of the program's ops in which, or in whose parts, a fault is planted."""
    planted = getattr(unit, "planted", None)
    return {op.id for op in program.ops if planted(op)} if planted else set()


class _Arena:
    """Where a program's buffers lie: the place that commands are lowered for."""

    def __init__(self, program: Program, native: Native, rows: int, state: State) -> None:
        self._state, self._rows = state, rows
        self._caches: list[Cache] = []
        shapes = buffer_shapes(program, native.package.tensors)
        self.selected = {name for name, shape in shapes.items() if shape.rows == "R"}
        self._widths = {name: shape.width for name, shape in shapes.items()}
        layout = _lay_out(program, self._widths, rows)
        self._block = np.zeros(layout.nbytes // 4 + 16, np.float32)
        start = -self._block.ctypes.data % 64 // 4
        self._arrays = {
            name: self._block[start + offset // 4 :][: rows * self._widths[name]]
            for name, offset in layout.offsets.items()
        }

    def view(self, name: str, rows: int) -> npt.NDArray[np.float32]:
        width = self._widths[name]
        return self._arrays[name][: rows * width].reshape(rows, width)

    def read(self, name: str) -> int:
        return int(self._arrays[name].ctypes.data)

    def write(self, name: str, width: int) -> int:
        return self.read(name)

    def width(self, name: str) -> int:
        return self._widths[name]

    def cache(self, keys: str, values: str) -> Cache:
        self._caches.append(cache_structure(self._state[keys], self._state[values], keys))
        return self._caches[-1]


def _lay_out(program: Program, widths: dict[str, int], rows: int) -> Plan:
    """Lives by op number; what only the parts of a fused op read lives while that op runs."""
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, op in enumerate(program.ops):
        names = itertools.chain.from_iterable((*part.reads, *part.writes) for part in op.parts)
        for name in names:
            if name in widths:
                first.setdefault(name, number)
                last[name] = number
    last[program.output] = len(program.ops)
    return plan([Span(name, rows * widths[name] * 4, first[name], last[name]) for name in first])
