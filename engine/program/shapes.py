"""How large a program's buffers are, told from its weights before anything ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from engine.program.ops import Op, Program


class Shaped(Protocol):
    """A tensor, as far as this module looks at it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class BufferShape:
    """(T, width), or (R, width) behind the selection of the rows whose logits are wanted."""

    rows: str  # "T" or "R"
    width: int

    def of(self, tokens: int, rows: int) -> tuple[int, int]:
        return (tokens if self.rows == "T" else rows, self.width)


def buffer_shapes(program: Program, tensors: Mapping[str, Shaped]) -> dict[str, BufferShape]:
    """Of every buffer that ops write, those inside fused ops too; inputs and caches excepted."""
    found: dict[str, BufferShape] = {}
    for op in program.flat():
        if op.kind == "kv_append":
            continue
        for index, name in enumerate(op.writes):
            found[name] = _shape(op, index, found, tensors)
    return found


def _shape(
    op: Op, index: int, known: Mapping[str, BufferShape], tensors: Mapping[str, Shaped]
) -> BufferShape:
    if op.kind == "embed":
        return BufferShape("T", tensors[op.weights[0]].shape[1])
    if op.kind == "linear":
        return BufferShape(known[op.reads[0]].rows, tensors[op.weights[0]].shape[0])
    if op.kind == "select":
        return BufferShape("R", known[op.reads[0]].width)
    # Rotated queries and keys are as wide as they were; a third output is the queries again.
    source = op.reads[1] if op.kind == "rope" and index == 1 else op.reads[0]
    return known[source]
