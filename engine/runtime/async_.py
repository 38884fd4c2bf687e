"""The async executor: every part of the board has a queue, and ops on different parts overlap.

Order across parts comes only from the schedule's event edges. Buffers are allocated ahead and
written in place, so an op that runs too early reads what lay there before, as it would on a board:
a missing edge gives wrong numbers, not an exception. The static check
(engine.program.happens_before) finds the same edge without running anything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
import weakref
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from engine.program.conflicts import BEGIN, END, Memory, require_lives
from engine.program.ops import Program
from engine.program.placement import DEFAULT, Placement
from engine.program.schedule import AsyncOps, Schedule, async_ids, derive
from engine.runtime.mistakes import LATE_S, NONE, Mistakes, Planted
from engine.runtime.queues import Event, ExecutorStuck, Job, Queues
from engine.runtime.slots import Slots, shared_memory
from engine.runtime.state import Buffer, NonFinite, State
from engine.runtime.sync import checked, require_finite
from engine.runtime.trace import Taps, Trace
from engine.units.base import Unit, prepare

DEADLINE_S = 120.0  # longest time without any op ending; a long prefill of a large model fits
PATIENCE_VARIABLE = "ENGINE_STUCK_S"  # the environment's, in place of it


def patience() -> float:
    """Seconds without progress after which a run's executor says that it is stuck."""
    return float(os.environ.get(PATIENCE_VARIABLE) or DEADLINE_S)


class AsyncExecutor:
    """Runs a program on one unit with a thread for each part of the placement.

    The schedule is derived from `placement`, with edges for the memory that buffers share. A
    `schedule` given instead is taken as it is, even if it lacks edges; then buffers share what
    `memory` says, nothing by default. Ops outside `async_ops` ("all", "none" or ids; default: what
    the schedule says, or all) are waited for before the next is submitted. `delays` hold back an
    op's result by so many seconds. `deadline_s` bounds the time without progress. Raises ValueError
    for ids that are not in the program, and for a schedule that does not fit it.
    """

    def __init__(
        self,
        program: Program,
        unit: Unit,
        trace: Trace | None = None,
        *,
        schedule: Schedule | None = None,
        placement: Placement = DEFAULT,
        memory: Memory | None = None,
        async_ops: AsyncOps | None = None,
        delays: Mapping[str, float] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        prepare(unit, program)
        tensors = unit.package.tensors
        if schedule is None and memory is None:
            memory = shared_memory(program, tensors, np.dtype(unit.dtype).itemsize)
        self.memory = memory or {}
        require_lives(program, self.memory)
        chosen = derive(program, placement, memory=memory) if schedule is None else schedule
        if async_ops is not None:
            chosen = chosen.with_async(program, async_ops)
        chosen.check(program)
        self.program, self.unit, self.trace, self.schedule = program, unit, trace, chosen
        self.step = 0
        self.delays = _delays(program, delays or {})
        part = {op_id: name for name, queue in chosen.queues.items() for op_id in queue}
        self.parts = tuple(part[op.id] for op in program.ops)
        self._slots = Slots(program, tensors, unit.dtype, self.memory)
        self._waits: dict[str, list[tuple[str, int]]] = {}
        for edge in sorted(chosen.edges, key=str):
            if edge.producer not in (BEGIN, END):  # the caller's own order keeps those
                self._waits.setdefault(edge.consumer, []).append((edge.producer, edge.steps))
        races = getattr(unit, "races", ())  # of a faulty unit
        self._planted = Planted(races, program, chosen, self.memory) if races else None
        self._checked = [checked(op) for op in program.ops]
        self._runs = 0  # counts on where `step` is set back
        self._closed = False
        self._deadline_s = deadline_s
        self._queues = Queues(chosen.queues, self._patience())
        # An executor that is dropped without close() leaves no threads either.
        weakref.finalize(self, self._queues.stop).atexit = False

    def change(self, async_ops: AsyncOps, delays: Mapping[str, float]) -> None:
        """Other flags and delays from the next step on, once everything submitted is over.

        Raises ValueError as the constructor does, and what an op that still ran raised.
        """
        schedule = self.schedule.with_async(self.program, async_ops)
        held_back = _delays(self.program, delays)
        self.drain()
        self.schedule, self.delays = schedule, held_back
        self._queues.deadline_s = self._patience()

    def drain(self) -> None:
        """Wait until every op that was submitted is over. Raises what one of them raised."""
        if self._queues.running:
            self._queues.drain()

    def _patience(self) -> float:
        return self._deadline_s + max(self.delays.values(), default=0.0)

    def run(self, state: State, taps: Taps | None = None) -> Buffer:
        """One step. `state` holds inputs and caches; returns the logits (R, V).

        Raises NonFinite naming the first op whose output is not finite, whatever else an op raised,
        and ExecutorStuck when no op ends for as long as the deadline. All threads are joined then;
        the next step starts them again.
        """
        if self._closed:
            raise RuntimeError("the executor is closed: make another one")
        try:
            if not self._queues.running:
                self._queues.start({op.id: self._runs for op in self.program.ops})
            return self._step(state, taps)
        except BaseException:
            self._stop_quietly()
            raise
        finally:
            self._runs += 1

    def _step(self, state: State, taps: Taps | None) -> Buffer:
        queues, run = self._queues, self._runs
        tokens, rows = len(state["tokens"]), len(state["rows"])
        if not self._slots.fits(tokens, rows):
            queues.drain()
            self._slots.grow(tokens, rows)
        planted = self._planted
        mistakes = NONE if planted is None else planted.begin(self.schedule.asynchronous)
        queues.wait(self._events(BEGIN, mistakes), BEGIN)
        for name in self.program.inputs:
            self._slots.put(name, state[name])
        caches = {name: state[name] for name in self.program.caches}
        step = _Step(self.step, tokens, rows, taps, caches, mistakes)
        for index, op in enumerate(self.program.ops):
            work = functools.partial(self._execute, step, index)
            job = Job(op.id, (run, index), self._events(op.id, mistakes), work)
            part = mistakes.moved.get(op.id, self.parts[index])
            queues.submit(part, job)
            if op.id not in self.schedule.asynchronous:
                queues.wait([(op.id, run + 1)], "the caller")
        queues.wait(self._events(END, mistakes), END)
        self.step += 1
        return self._slots.view(self.program.output, tokens, rows).copy()

    def close(self) -> None:
        """Join the threads. Raises the error of an op that no step was there to raise."""
        self._closed = True
        error = self._queues.stop()
        if error is not None:
            raise error

    def __enter__(self) -> AsyncExecutor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True
            self._stop_quietly()

    def _stop_quietly(self) -> None:
        try:
            self._queues.stop()
        except ExecutorStuck:  # the error on its way says more; a hung op ends with the process
            self._closed = True

    def _events(self, act: str, mistakes: Mistakes) -> tuple[Event, ...]:
        """What `act` of the current run waits for."""
        waits = self._waits.get(act, [])
        if mistakes is not NONE:
            waits = [wait for wait in waits if (wait[0], act) not in mistakes.lost]
            if act in mistakes.after:
                waits.append((mistakes.after[act], 0))
        return tuple((producer, self._runs + 1 - steps) for producer, steps in waits)

    def _execute(self, step: _Step, index: int) -> None:
        """One op, on the thread of its queue."""
        op, slots, mistakes = self.program.ops[index], self._slots, step.mistakes
        delay = self.delays.get(op.id, 0.0)
        if op.id in mistakes.late:
            delay += LATE_S
        if op.id in mistakes.held_back:
            self._queues.pause(LATE_S)
        start = time.perf_counter_ns()
        state = {
            name: step.caches[name]
            if name in step.caches
            else slots.view(name, step.tokens, step.rows)
            for name in {*op.reads, *op.appends, *self.program.inputs}
        }
        if delay and op.appends:  # it writes in place, so all of it is late, with the inputs of now
            for name in state.keys() - step.caches.keys():
                state[name] = state[name].copy()
            self._queues.pause(delay)
        try:
            self.unit.execute(op, state)
        except NonFinite as error:
            error.step = step.number  # which a unit does not count
            raise
        for name in self._checked[index]:
            require_finite(step.number, op, state[name])
        if step.taps is not None:
            step.taps.record(op, state)
        if delay and not op.appends:
            self._queues.pause(delay)
        for name in op.writes:
            if name not in step.caches:
                slots.put(name, state[name])
        if op.id in mistakes.stray:
            slots.spill(*mistakes.stray[op.id])
        if self.trace is not None:
            end = time.perf_counter_ns()
            with self._queues.changed:
                self.trace.record(step.number, index, start, end)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What the jobs of one step share."""

    number: int
    tokens: int  # T
    rows: int  # R
    taps: Taps | None
    caches: State
    mistakes: Mistakes


def _delays(program: Program, delays: Mapping[str, float]) -> dict[str, float]:
    async_ids(program, delays.keys())  # names an unknown op
    for op_id, seconds in delays.items():
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"delay of op {op_id} is {seconds!r}, expected seconds from 0 on")
    return dict(delays)
