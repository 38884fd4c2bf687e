"""Where the buffers of a step lie: one block, in which a buffer's place is used again after its
last reader.

Buffers are rows of float32, all with room for the same number of rows, whatever a step needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclasses.dataclass(frozen=True)
class Span:
    """A buffer's life: written by op `first`, read last by op `last`; `nbytes` of it."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Offsets by name, aligned, and the size of the block, in bytes."""

    offsets: Mapping[str, int]
    nbytes: int


def plan(spans: Sequence[Span]) -> Plan:
    """Offsets so that no two buffers that live at once overlap; large ones are placed first.

    A buffer's life includes the op that reads it last, so what this op writes lies elsewhere.
    """
    placed: list[tuple[int, int, Span]] = []  # begin, end
    offsets: dict[str, int] = {}
    for span in sorted(spans, key=lambda s: (-s.nbytes, s.first, s.name)):
        size = -(-span.nbytes // ALIGNMENT) * ALIGNMENT
        at = 0
        for begin, end, other in sorted(placed, key=lambda p: p[0]):
            apart = other.last < span.first or span.last < other.first
            if apart or end <= at:
                continue
            if begin - at >= size:
                break
            at = end
        offsets[span.name] = at
        placed.append((at, at + size, span))
    return Plan(offsets, max((end for _, end, _ in placed), default=0))
