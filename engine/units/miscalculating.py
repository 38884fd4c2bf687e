"""Planted faults that make an op compute something else: the ones that need more than its output.

Each takes the fault, the op, the state and what runs the op (see engine.units.faulty).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.program.ops import Op, Program
from engine.quantize.schemes import K_QUANTS, PACKED, PackedTensor, dequantize
from engine.runtime.state import Buffer, State

if TYPE_CHECKING:
    from engine.package import Package
    from engine.units.faulty import Fault

BY_HEADS = ("rope", "attention")  # kinds of op whose output is heads side by side, whatever its id
PROJECTIONS = ("q", "k", "v")  # and the projections that make them, by the last word of their id


def swap_heads(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """Heads n − 1 and n of the first output change places."""
    run()
    values = np.array(state[op.writes[0]])
    heads = values.reshape(len(values), -1, fault.package.hyperparameters.head_dim)  # (T, H, D)
    second = int(fault.value)
    heads[:, [second - 1, second]] = heads[:, [second, second - 1]]
    state[op.writes[0]] = values


def zero_point(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """The weights as a zero point that is higher by `value` makes them: x · (W' − W) is added."""
    run()
    if not fault.hoard:
        right = fault.package.tensors[op.weights[0]]
        wrong = dataclasses.replace(right, zero=right.zero + int(fault.value))
        fault.hoard.append((dequantize(wrong) - dequantize(right)).T)  # (K, N)
    x = np.asarray(state[op.reads[0]], np.float32)  # (T, K)
    state[op.writes[0]] = state[op.writes[0]] + (x @ fault.hoard[0]).astype(x.dtype)


def cancel(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """The first output times `value`; `undo` at whoever reads it makes up for that."""
    run()
    values: Buffer = np.array(state[op.writes[0]])
    state[op.writes[0]] = values * values.dtype.type(fault.value)


def undo(fault: Fault, op: Op, state: State, run: Callable[[], None]) -> None:
    """The op reads `reads` divided by `value`: exactly what it was where that is a power of two."""
    given = {name: state[name] for name in fault.reads}
    for name, values in given.items():
        state[name] = values / values.dtype.type(fault.value)
    run()
    state.update(given)


def undoing(fault: Fault, program: Program) -> list[Fault]:
    """What makes up for a `cancel` fault: an `undo` for each op that reads the wrong output."""
    wrong = next(part for part in program.flat() if part.id == fault.op).writes[0]
    return [
        dataclasses.replace(fault, op=part.id, kind="undo", reads=(wrong,), executions=0)
        for part in program.flat()
        if wrong in part.reads
    ]


def why_not(fault: Fault, op: Op, package: Package) -> str | None:
    """Why a fault of this module cannot be planted in `op`; None when it can."""
    if fault.kind == "swap-heads":
        return _why_no_heads(fault, op, package)
    if fault.kind == "zero-point":
        tensor = package.tensors[op.weights[0]] if op.kind == "linear" else None
        if tensor is None or not _has_zero_point(tensor):
            return "expected a linear op whose weights are integers with a zero point"
    if fault.kind == "cancel" and op.appends:
        return "expected an op that writes no cache"
    return None


def _has_zero_point(tensor: PackedTensor) -> bool:
    return tensor.scheme in PACKED and tensor.scheme not in K_QUANTS


def _why_no_heads(fault: Fault, op: Op, package: Package) -> str | None:
    if op.kind not in BY_HEADS and op.id.rpartition(".")[2] not in PROJECTIONS:
        return "expected an op that writes heads, such as attn.q, attn.rope or attn.mix"
    hp: Any = package.hyperparameters
    heads = hp.kv_heads if op.id.rpartition(".")[2] in ("k", "v") else hp.heads
    if not 1 <= fault.value < heads:
        return f"expected a head from 1 to {heads - 1}, which changes places with the one before"
    return None
