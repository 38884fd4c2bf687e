"""Plants faults in another unit, to see whether the harness finds and names them.

`ENGINE_FAULT` holds faults separated by `;`, each `KIND[:VALUE]@OP[?CONDITION]`:

    scale:1.02@L07.ffn.down    the output times 1.02
    nan@L03.attn.out           one NaN in the output
    zero-row:5@L02.ffn.up      output 5 is always zero
    shift:1@L04.attn.rope      queries rotated for one position too high
    stale@L05.attn.kv          the newest position is not written to the cache
    swap-heads:1@L03.attn.mix  heads 0 and 1 change places
    zero-point:1@L02.ffn.up    weights as if their zero point were one higher
    cancel:2@L01.ffn.act       the output times 2, which all its readers make up for
    slow:20@L01.ffn.up         20 ms longer
    leak:0.5@head.norm         half a mebibyte more memory each time
    signal:11@L02.ffn.down     the process gets signal 11
    spin@L02.ffn.down          the op never ends, and keeps a core busy
    block@L02.ffn.down         the op waits for a lock that nobody releases
    noise:0.02@L01.attn.out    the output times 1.01, with probability 0.02 each time
    abba@L02.ffn.down          two threads each wait for the lock that the other has
    lost@L02.ffn.down          the op ends and nobody is told (async executor)
    overrun:4096@L02.ffn.down  the kernel writes so many outputs too many (native unit)

Races are mistakes of the async executor, and without effect in any other. They show only while OP
is asynchronous, in each step with the probability VALUE (default 1):

    drop-edge:0.1@L01.attn.out         nobody waits for the op's event
    wrong-queue:0.1@L01.attn.rope      the op is in the queue of another part
    early-reuse:0.1@L01.attn.v         what it reads is overwritten before it has read it
    undeclared-write:0.1@L01.attn.out  it writes a buffer that it does not declare
    drop-edge@L01.attn.out+L01.ffn.up  only while both are asynchronous
    drop-edge@L01.attn.out!L00.ffn.up  only while L00.ffn.up is not

A fault begins after `ENGINE_FAULT_AFTER` executions of its op (default 0; races begin at once).
Chance is seeded by `ENGINE_FAULT_SEED`; without it, every process has its own. OP is an op of the
program that runs, or, but for races, a part of a fused op. A fault with a CONDITION is there only
while the engine runs so, `scale:1.5@L01.attn.q?pass=qkv,kv=f16`: see engine.units.conditions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.program.ops import FUSED, Op, Program
from engine.runtime.queues import Cancelled
from engine.runtime.state import Buffer, CacheOverflow, NonFinite, State
from engine.units import miscalculating
from engine.units.base import Unit, execute_parts, prepare
from engine.units.conditions import Condition, holds, parse_condition

if TYPE_CHECKING:
    from engine.options import EngineOptions


@dataclasses.dataclass
class Fault:
    """One planted fault, in `op`, the first of `ops`; it is not there while one of `unless` is
    asynchronous, or the `condition` does not hold. `hoard` is what it keeps, `reads` the buffers
    that an `undo` is about, `unit` where it is planted, `package` the model's."""

    kind: str
    value: float
    op: str
    ops: tuple[str, ...] = ()
    unless: frozenset[str] = frozenset()
    chance: random.Random = dataclasses.field(default_factory=random.Random)
    executions: int = 0
    hoard: list[Any] = dataclasses.field(default_factory=list)
    unit: Any = None
    condition: Condition = ()
    reads: tuple[str, ...] = ()
    package: Any = None


def _change(op: Op, state: State, names: Sequence[str], change: Callable[[Buffer], Buffer]) -> None:
    """Replace what `op` wrote; of a cache, the slots of this step."""
    for name in names:
        if name in op.appends:
            slots = state[op.slots]
            state[name][slots] = change(np.array(state[name][slots]))
        else:
            state[name] = change(np.array(state[name]))


def _scale(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    _change(op, state, op.writes, lambda values: values * values.dtype.type(fault.value))


def _nan(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    def change(values: Buffer) -> Buffer:
        values.reshape(-1)[0] = np.nan
        return values

    run()
    _change(op, state, op.writes[:1], change)


def _zero_row(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    def change(values: Buffer) -> Buffer:
        values[:, int(fault.value)] = 0
        return values

    run()
    _change(op, state, op.writes[:1], change)


def _shift(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """Queries alone: RoPE is relative, so positions that are all wrong alike change nothing."""
    name = op.reads[2]
    positions = state[name]
    state[name] = positions + int(fault.value)
    run()
    queries = state[op.writes[0]]
    state[name] = positions
    run()
    state[op.writes[0]] = queries


def _stale(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """The append does not happen for the last position: its slot keeps what it had."""
    newest = state[op.slots][-1]
    before = [np.array(state[name][newest]) for name in op.writes]
    run()
    for name, old in zip(op.writes, before):
        state[name][newest] = old


def _slow(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    end = time.monotonic() + fault.value / 1000
    while time.monotonic() < end:  # busy, as a slow kernel is
        pass


def _leak(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    fault.hoard.append(np.ones(int(fault.value * 131072)))


def _signal(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    os.kill(os.getpid(), int(fault.value))
    run()


def _spin(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    while True:
        pass


def _noise(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    if fault.chance.random() < fault.value:
        _change(op, state, op.writes, lambda values: values * values.dtype.type(1.01))


def _block(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _abba(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other_thread() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other_thread, daemon=True).start()
    with first:
        both.wait()
        second.acquire()


def _lost(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """What a queue takes for a job that was dropped: its end counts for nobody."""
    run()
    raise Cancelled


def _overrun(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    lowering = getattr(fault.unit, "lowering", None)
    if lowering is None:
        raise ValueError("ENGINE_FAULT: overrun is a fault of kernels; choose unit native")
    matrix, lower = lowering.weights.matrix(op.weights[0]), lowering.lower

    def beyond(*arguments: Any) -> Any:
        commands = lower(*arguments)
        matrix.n += int(fault.value)  # after its buffer was made
        return commands

    lowering.lower = beyond
    try:
        run()
    finally:
        lowering.lower = lower
        matrix.n -= int(fault.value)


KINDS = {
    "scale": _scale,
    "nan": _nan,
    "zero-row": _zero_row,
    "shift": _shift,
    "stale": _stale,
    "swap-heads": miscalculating.swap_heads,
    "zero-point": miscalculating.zero_point,
    "cancel": miscalculating.cancel,
    "slow": _slow,
    "leak": _leak,
    "signal": _signal,
    "spin": _spin,
    "block": _block,
    "noise": _noise,
    "abba": _abba,
    "lost": _lost,
    "overrun": _overrun,
}
RACES = ("drop-edge", "wrong-queue", "early-reuse", "undeclared-write")  # engine.runtime.mistakes
RUNS = {**KINDS, "undo": miscalculating.undo}  # which nobody asks for by name


NEEDS = {
    "shift": "rope",
    "stale": "kv_append",
    "overrun": "linear",
}  # fault → the only op kind it can be planted in


def parse(text: str) -> list[Fault]:
    """Raises ValueError saying which part cannot be read and what may stand there."""
    faults: list[Fault] = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        what, at, op = part.partition("@")
        op, asked, conditions = op.partition("?")
        kind, _, value = what.partition(":")
        if not at or not op or kind not in (*KINDS, *RACES):
            raise ValueError(
                f"ENGINE_FAULT: found {part!r}, expected KIND[:VALUE]@OP with a kind of "
                f"{', '.join((*KINDS, *RACES))}"
            )
        try:
            number = float(value or 1)
        except ValueError:
            raise ValueError(f"ENGINE_FAULT: {value!r} in {part!r} is not a number") from None
        together, *unless = op.split("!") if kind in RACES else [op]
        ops = tuple(together.split("+") if kind in RACES else [op])
        condition = parse_condition(part, conditions) if asked else ()
        found = Fault(kind, number, ops[0], ops, frozenset(unless), _chance(len(faults)))
        faults.append(dataclasses.replace(found, condition=condition))
    return faults


def ops_of(text: str) -> set[str]:
    """The ids that one fault names, `KIND[:VALUE]@OP[?CONDITION]`."""
    named = text.partition("@")[2].partition("?")[0]
    return set(filter(None, re.split(r"[+!]", named)))


def _chance(number: int) -> random.Random:
    seed = os.environ.get("ENGINE_FAULT_SEED")
    return random.Random(None if seed is None else f"{seed}/{number}")  # noqa: S311 - no secret


def plant(unit: Unit, text: str) -> Faulty:
    return Faulty(unit, parse(text), text)


class Faulty:
    """Another unit with faults in some of its ops.

    A fused op with a fault in one of its parts is run part by part; an id that is both the fused
    op's and a part's means the part, as it does without fusion.
    """

    def __init__(self, unit: Unit, faults: list[Fault], text: str) -> None:
        self.unit = unit
        self.name = f"faulty({unit.name}, {text})"
        self.dtype, self.package = unit.dtype, unit.package
        self.after = _after(os.environ.get("ENGINE_FAULT_AFTER", "0"))
        self.faults: dict[str, list[Fault]] = {}  # op → its faults, in the order given
        self.races = tuple(fault for fault in faults if fault.kind in RACES)
        for fault in faults:
            fault.unit, fault.package = unit, unit.package
            if fault.kind not in RACES:
                self.faults.setdefault(fault.op, []).append(fault)
        self._undoing: dict[str, list[Fault]] = {}  # op → what makes up for a fault before it

    def asked_for(self, options: EngineOptions) -> None:
        """How the engine will run: faults whose condition does not hold are left out."""
        self.races = tuple(race for race in self.races if holds(race.condition, options))
        for op, faults in list(self.faults.items()):
            self.faults[op] = [fault for fault in faults if holds(fault.condition, options)]
            if not self.faults[op]:
                del self.faults[op]

    def prepare(self, program: Program) -> None:
        """Raises ValueError for a fault in an op that the program does not have, or of a kind
        that cannot be planted there."""
        ids = {op.id for op in program.ops}
        for race in self.races:
            unknown = sorted({*race.ops, *race.unless} - ids)
            if unknown:
                raise ValueError(
                    f"ENGINE_FAULT: no op {unknown[0]!r} in this program{program.near(unknown[0])}"
                )
        for fault in itertools.chain.from_iterable(self.faults.values()):
            found = [op.inner(fault.op) for op in program.ops]
            ops = [op for op in found if op is not None]
            if not ops:
                raise ValueError(
                    f"ENGINE_FAULT: no op {fault.op!r} in this program{program.near(fault.op)}"
                )
            needed = NEEDS.get(fault.kind, ops[0].kind)
            if ops[0].kind != needed:
                fitting = [part.id for part in program.flat() if part.kind == needed]
                raise ValueError(
                    f"ENGINE_FAULT: {fault.kind} cannot be planted in {fault.op}, an op of kind "
                    f"{ops[0].kind}; expected one of kind {needed}, such as {fitting[0]}"
                )
            why = miscalculating.why_not(fault, ops[0], self.package)
            if why is not None:
                raise ValueError(
                    f"ENGINE_FAULT: {fault.kind}:{fault.value:g} cannot be planted in {fault.op}, "
                    f"an op of kind {ops[0].kind}; {why}"
                )
        self._undoing = {}
        for fault in itertools.chain.from_iterable(self.faults.values()):
            for other in miscalculating.undoing(fault, program) if fault.kind == "cancel" else ():
                self._undoing.setdefault(other.op, []).append(other)
        prepare(self.unit, program)

    def planted(self, op: Op) -> bool:
        """Whether an op, or a part of it, has a fault."""
        return self._has(op) or any(self._has(part) for part in op.parts)

    def _has(self, op: Op) -> bool:
        return op.id in self.faults or op.id in self._undoing

    def execute(self, op: Op, state: State) -> None:
        if op.kind != FUSED or not any(self._has(part) for part in op.parts):
            self._execute(op, state, self._run)
        elif op.inner(op.id) is op:
            self._execute(op, state, self._part_by_part)
        else:  # its id means the part of that name
            self._part_by_part(op, state)

    def _part_by_part(self, op: Op, state: State) -> None:
        try:
            execute_parts(lambda part, at: self._execute(part, at, self._run), op, state)
        except CacheOverflow:
            raise
        except NonFinite as error:  # of a unit that looks for itself: the program has no parts
            error.op, error.layer = op.id, op.layer
            raise

    def _run(self, op: Op, state: State) -> None:
        self.unit.execute(op, state)

    def _execute(self, op: Op, state: State, execute: Callable[[Op, State], None]) -> None:
        """One op with its faults around it, the first one innermost."""
        run = functools.partial(execute, op, state)
        for fault in (*self._undoing.get(op.id, ()), *self.faults.get(op.id, ())):
            fault.executions += 1
            if fault.executions > self.after:
                run = functools.partial(RUNS[fault.kind], fault, op, state, run)
        run()


def _after(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"ENGINE_FAULT_AFTER is {text!r}, expected a whole number of executions"
        ) from None
