"""A decode step as data: ops with declared reads and writes, in program order.

Buffers have names, and each is written by exactly one op of a step (KV caches excepted: they live
across steps). That single assignment is what taps, alignment and the happens-before check rely on;
which memory a buffer lies in is the runtime's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# kind → part of a board that runs it by default (the three-part placement, which a board may
# override).
PLACEMENT: Mapping[str, str] = {
    "embed": "vector",
    "rmsnorm": "vector",
    "linear": "matrix",
    "rope": "vector",
    "kv_append": "vector",
    "attention": "vector",
    "swiglu": "vector",
    "add": "vector",
    "select": "control",
}


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation. `id` reads like a path: `L07.attn.q`, `L07.ffn.down`, `head.logits`."""

    id: str
    kind: str
    reads: tuple[str, ...]  # buffers
    writes: tuple[str, ...]  # buffers
    weights: tuple[str, ...] = ()  # tensors of the package
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer(self) -> int | None:
        """The transformer layer, or None for the embedding and the head."""
        head = self.id.split(".", 1)[0]
        return int(head[1:]) if head[:1] == "L" and head[1:].isdigit() else None


@dataclasses.dataclass(frozen=True)
class Program:
    """The ops of one decode step, in an order that respects their reads and writes.

    `inputs` are buffers the caller fills: `tokens` (T,) int64, `positions` (T,) int64, and `rows`
    (R,) int64, the rows of T whose logits are wanted. `output` is the logits buffer, (R, V).
    `caches` are written and read across steps.
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    output: str
    caches: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs) | set(self.caches)
        seen: set[str] = set()
        for op in self.ops:
            if op.id in seen:
                raise ValueError(f"op {op.id}: its id is used twice in one program")
            if op.kind not in PLACEMENT:
                raise ValueError(
                    f"op {op.id}: unknown kind {op.kind!r}, known: {sorted(PLACEMENT)}"
                )
            missing = [name for name in op.reads if name not in known]
            if missing:
                raise ValueError(f"op {op.id} reads {missing[0]!r}, which no earlier op writes")
            twice = [name for name in op.writes if name in known and name not in self.caches]
            if twice:
                raise ValueError(f"op {op.id} writes {twice[0]!r}, which an earlier op wrote")
            seen.add(op.id)
            known.update(op.writes)
        if self.output not in known:
            raise ValueError(f"program output {self.output!r} is written by no op")

    def op(self, op_id: str) -> Op:
        """Raises KeyError naming the nearest ids when there is no such op."""
        for op in self.ops:
            if op.id == op_id:
                return op
        near = [op.id for op in self.ops if op.id.split(".")[-1] == op_id.split(".")[-1]][:3]
        raise KeyError(f"no op {op_id!r} in this program" + (f"; near: {near}" if near else ""))
