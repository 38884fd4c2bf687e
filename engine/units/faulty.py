"""Plants faults in another unit, to see whether the harness finds and names them.

`ENGINE_FAULT` holds faults separated by `;`, each `KIND[:VALUE]@OP`:

    scale:1.02@L07.ffn.down    the output times 1.02
    nan@L03.attn.out           one NaN in the output
    zero-row:5@L02.ffn.up      output 5 is always zero
    shift:1@L04.attn.rope      queries rotated for one position too high
    stale@L05.attn.kv          the newest position is not written to the cache
    slow:20@L01.ffn.up         20 ms longer
    leak:0.5@head.norm         half a mebibyte more memory each time
    signal:11@L02.ffn.down     the process gets signal 11

A fault begins after `ENGINE_FAULT_AFTER` executions of its op (default 0).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.program.ops import Op
from engine.runtime.state import State
from engine.units.base import Unit


@dataclasses.dataclass
class Fault:
    """One planted fault. `hoard` keeps what a leak allocates."""

    kind: str
    value: float
    op: str
    executions: int = 0
    hoard: list[Any] = dataclasses.field(default_factory=list)


def _scale(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    for name in op.writes:
        state[name] = state[name] * state[name].dtype.type(fault.value)


def _nan(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    state[op.writes[0]] = state[op.writes[0]].copy()
    state[op.writes[0]].reshape(-1)[0] = np.nan


def _zero_row(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    run()
    state[op.writes[0]] = state[op.writes[0]].copy()
    state[op.writes[0]][:, int(fault.value)] = 0


def _shift(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """Queries alone: RoPE is relative, so positions that are all wrong alike change nothing."""
    positions = state["positions"]
    state["positions"] = positions + int(fault.value)
    run()
    queries = state[op.writes[0]]
    state["positions"] = positions
    run()
    state[op.writes[0]] = queries


def _stale(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """The append does not happen for the last position: its slot keeps what it had."""
    newest = state["slots"][-1]
    before = [state[name][newest].copy() for name in op.writes]
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


KINDS = {
    "scale": _scale,
    "nan": _nan,
    "zero-row": _zero_row,
    "shift": _shift,
    "stale": _stale,
    "slow": _slow,
    "leak": _leak,
    "signal": _signal,
}


def parse(text: str) -> list[Fault]:
    """Raises ValueError saying which part cannot be read and what may stand there."""
    faults = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        what, at, op = part.partition("@")
        kind, _, value = what.partition(":")
        if not at or not op or kind not in KINDS:
            raise ValueError(
                f"ENGINE_FAULT: found {part!r}, expected KIND[:VALUE]@OP with a kind of "
                f"{', '.join(KINDS)}"
            )
        try:
            number = float(value or 1)
        except ValueError:
            raise ValueError(f"ENGINE_FAULT: {value!r} in {part!r} is not a number") from None
        faults.append(Fault(kind, number, op))
    return faults


def plant(unit: Unit, text: str) -> Faulty:
    return Faulty(unit, parse(text), text)


class Faulty:
    """Another unit with faults in some of its ops."""

    def __init__(self, unit: Unit, faults: list[Fault], text: str) -> None:
        self.unit, self.faults = unit, {fault.op: fault for fault in faults}
        self.name = f"faulty({unit.name}, {text})"
        self.dtype, self.package = unit.dtype, unit.package
        self.after = int(os.environ.get("ENGINE_FAULT_AFTER", "0"))

    def execute(self, op: Op, state: State) -> None:
        fault = self.faults.get(op.id)
        if fault is None:
            self.unit.execute(op, state)
            return
        fault.executions += 1
        if fault.executions <= self.after:
            self.unit.execute(op, state)
        else:
            KINDS[fault.kind](fault, op, state, lambda: self.unit.execute(op, state))
