"""The activation joins the fused gate and up projections, whose outputs nobody else reads.

Without the pass `gate_up` there is nothing to join, because the activation needs both outputs.
"""

from __future__ import annotations

from engine.program.ops import FUSED, Op, Program, fuse

ORDER = 30


def run(program: Program) -> Program:
    writers = {name: op for op in program.ops for name in op.writes}
    groups: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.kind != "swiglu":
            continue
        gate, up = (writers.get(name) for name in op.reads)
        if gate is not None and gate is up and gate.kind == FUSED:
            groups[gate.id] = [gate, op]
    return fuse(program, groups)
