"""A full cache that goes on: the first tokens are kept, the others lie in a ring.

Slots 0 … keep − 1 hold the kept prefix for good; a token beyond the context overwrites the oldest
of the other slots. What stands in the cache is never rewritten: RoPE's scores depend on differences
of positions alone, so keys of the window stay as they were rotated, and queries meet them at their
own, ever growing positions. Only the prefix has come nearer, by the tokens that were dropped since;
it is read with queries rotated for `position − dropped`, which is what attention over the remaining
tokens at positions 0 … S − 1 gives. Keeping the first tokens is what keeps such a model sane (Xiao
et al. 2023, "Efficient streaming language models with attention sinks").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from engine.program.ops import Op, Program
from engine.runtime.state import Buffer, ContextFull

if TYPE_CHECKING:
    from engine.architectures import Hyperparameters

# Their inverse frequencies are the same at every position, so scores depend on differences alone.
RELATIVE_ROPES = ("none", "linear", "llama3", "yarn")
PREFIX_POSITIONS = "prefix_positions"


@dataclasses.dataclass(frozen=True)
class Places:
    """Where positions of one sequence lie in `context` slots. `keep` None: no ring, a full cache
    refuses. Raises ValueError for a prefix that leaves no slot to go round in."""

    context: int
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 <= self.keep < self.context:
            raise ValueError(
                f"keep is {self.keep}, expected 0 to {self.context - 1}: at least one of the "
                f"context's {self.context} slots must be left for new tokens"
            )

    def require_room(self, position: int, tokens: int) -> None:
        """Raises ContextFull when `tokens` from `position` on do not fit and nothing gives way."""
        if self.keep is None and position + tokens > self.context:
            raise ContextFull(position, tokens, self.context)

    def pieces(self, position: int, tokens: int, most: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the steps in which `tokens` from `position` on are to be run.

        At most `most` at a time within the context; beyond it one by one, since a token overwrites
        a slot that the token before it still sees.
        """
        start = 0
        while start < tokens:
            left = self.context - (position + start)
            size = min(most, tokens - start, left) if left > 0 else 1
            yield start, start + size
            start += size

    def inputs(self, positions: Buffer, start: Buffer | int = 0) -> dict[str, Buffer]:
        """Keyword arguments of `step_inputs` for tokens at `positions` (T,), whose sequences have
        their first slots at `start` (T,) or all at one."""
        starts = np.broadcast_to(np.asarray(start, np.int64), positions.shape).copy()
        slots, places = positions, {}
        if self.keep is not None:
            turned = self.keep + (positions - self.keep) % (self.context - self.keep)
            slots = np.where(positions < self.keep, positions, turned)
        if self.keep:
            places[PREFIX_POSITIONS] = np.minimum(positions, self.context - 1)
        return {
            "slots": starts + slots,
            "starts": starts,
            "visible": np.minimum(positions + 1, self.context),
            **places,
        }


def require_relative(hp: Hyperparameters) -> None:
    """Raises ValueError naming a RoPE variant whose frequencies depend on the position."""
    if hp.rope not in RELATIVE_ROPES:
        raise ValueError(
            f"a ring cannot hold keys rotated by RoPE {hp.rope!r}: its angles do not depend on "
            f"differences of positions alone, as those of {', '.join(RELATIVE_ROPES)} do; run "
            "without keep, so that a full context is refused"
        )


def with_ring(program: Program, keep: int) -> Program:
    """The program that reads `keep` slots with queries of their own. Apply it before any fusion.

    `rope` writes a third buffer, `L00.attn.q_prefix`, for the input `prefix_positions`; `attention`
    reads it and has the attribute `keep`. Without a prefix the program is as it was.
    """
    if not keep:
        return program
    ops: list[Op] = []
    turned: dict[str, str] = {}  # queries → queries for the prefix
    for op in program.ops:
        if op.kind == "rope":
            prefix = f"{op.id.rpartition('.')[0]}.q_prefix"
            turned[op.writes[0]] = prefix
            op = dataclasses.replace(
                op, reads=(*op.reads, PREFIX_POSITIONS), writes=(*op.writes, prefix)
            )
        elif op.kind == "attention":
            op = dataclasses.replace(
                op,
                reads=(*op.reads, turned[op.reads[0]]),
                attributes={**op.attributes, "keep": keep},
            )
        elif any(part.kind in ("rope", "attention") for part in op.parts):
            raise ValueError(f"op {op.id} is fused already; make the ring before fusing")
        ops.append(op)
    return dataclasses.replace(program, ops=tuple(ops), inputs=(*program.inputs, PREFIX_POSITIONS))
