"""One op for the rotation of queries and keys, the append to the cache and the attention."""

from __future__ import annotations

from engine.program.ops import Op, Program, fuse

ORDER = 60


def run(program: Program) -> Program:
    groups: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.kind != "attention":
            continue
        rope = [o for o in program.ops if o.kind == "rope" and set(o.writes) & set(op.reads)]
        append = [o for o in program.ops if o.kind == "kv_append" and set(o.writes) & set(op.reads)]
        if len(rope) == len(append) == 1 and set(rope[0].writes) & set(append[0].reads):
            groups[op.id] = [*rope, *append, op]
    return fuse(program, groups)
