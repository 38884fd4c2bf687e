"""One op for the projections of queries, keys and values, which all read the same input.

Norms of single query or key heads that follow go along.
"""

from __future__ import annotations

from engine.program.ops import Op, Program, fuse

ORDER = 10


def run(program: Program) -> Program:
    groups: dict[str, list[Op]] = {}
    ops = {op.id: op for op in program.ops}
    for op_id, q in ops.items():
        prefix, _, last = op_id.rpartition(".")
        k, v = ops.get(f"{prefix}.k"), ops.get(f"{prefix}.v")
        if last != "q" or k is None or v is None:
            continue
        if {op.kind for op in (q, k, v)} != {"linear"} or not q.reads == k.reads == v.reads:
            continue
        written = {*q.writes, *k.writes}
        norms = [
            op
            for op in program.ops
            if op.kind == "rmsnorm" and "heads" in op.attributes and op.reads[0] in written
        ]
        groups[f"{prefix}.qkv"] = [q, k, v, *norms]
    return fuse(program, groups)
