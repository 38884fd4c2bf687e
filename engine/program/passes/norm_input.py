"""A norm joins the one op that reads it, so that its output goes straight into the input that the
multiplication wants.

That op is a linear one, or the fused projections; a norm with several readers stays alone.
"""

from __future__ import annotations

from engine.program.ops import Op, Program, fuse

ORDER = 40


def run(program: Program) -> Program:
    groups: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.kind != "rmsnorm" or "heads" in op.attributes:
            continue
        readers = [other for other in program.ops if set(op.writes) & set(other.reads)]
        if len(readers) == 1 and op.writes[0] != program.output:
            first = readers[0].parts[0]
            if first.kind == "linear" and first.reads == op.writes:
                groups[readers[0].id] = [op, readers[0]]
    return fuse(program, groups)
