"""One op for the gate and up projections of a feed-forward part, which read the same input."""

from __future__ import annotations

from engine.program.ops import Op, Program, fuse

ORDER = 20


def run(program: Program) -> Program:
    writers = {name: op for op in program.ops for name in op.writes}
    groups: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.kind != "swiglu":
            continue
        gate, up = (writers.get(name) for name in op.reads)
        if gate is None or up is None or {gate.kind, up.kind} != {"linear"}:
            continue
        if gate is not up and gate.reads == up.reads:
            groups[f"{op.id.rpartition('.')[0]}.gate_up"] = [gate, up]
    return fuse(program, groups)
