"""The addition to the residual stream joins the projection whose output it alone reads."""

from __future__ import annotations

from engine.program.ops import Op, Program, fuse

ORDER = 50


def run(program: Program) -> Program:
    groups: dict[str, list[Op]] = {}
    writers = {name: op for op in program.ops for name in op.writes}
    for op in program.ops:
        if op.kind != "add":
            continue
        linear = writers.get(op.reads[1])
        if linear is None or linear.kind != "linear" or op.reads[0] == op.reads[1]:
            continue
        others = [o for o in program.ops if o is not op and set(linear.writes) & set(o.reads)]
        if not others and program.output not in linear.writes:
            groups[linear.id] = [linear, op]
    return fuse(program, groups)
