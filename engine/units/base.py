"""What a unit is. A unit is a module of this folder with `create(package, context)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from engine.program.ops import Op, Program
from engine.runtime.state import State

if TYPE_CHECKING:
    from engine.package import Package


class Unit(Protocol):
    """Executes ops one at a time on named buffers.

    Ops whose reads and writes do not touch may be executed at the same time by several threads. All
    ops of a kind, and fused ops with such a part, run on one thread as long as the kind is linear
    or attention; what a unit keeps for scratch in other kinds has to belong to a thread.

    Optional: `prepare(program)`, called by an executor before its first step. It raises ValueError
    for a program that the unit cannot run as it is set up.
    """

    name: str  # as stored with a result, e.g. "packed" or "faulty(packed, scale:1.02@L07.ffn.down)"
    dtype: Any  # of activations and KV cache
    package: Package  # the weights it computes with

    def execute(self, op: Op, state: State) -> None:
        """Read `op.reads`, write `op.writes`. Raises KeyError for a missing buffer."""
        ...


def prepare(unit: Unit, program: Program) -> None:
    """Tell a unit which program it will run, if it wants to know."""
    hook = getattr(unit, "prepare", None)
    if hook is not None:
        hook(program)


def execute_parts(execute: Callable[[Op, State], None], op: Op, state: State) -> None:
    """A fused op part by part; what only the parts read of each other is dropped again."""
    inside = {name for part in op.parts for name in part.writes} - set(op.writes)
    for part in op.parts:
        execute(part, state)
    for name in inside:
        del state[name]
