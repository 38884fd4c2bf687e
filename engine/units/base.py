"""What a unit is. A unit is a module of this folder with `create(package, context)`."""

from __future__ import annotations

from typing import Any, Protocol

from engine.program.ops import Op
from engine.runtime.state import State


class Unit(Protocol):
    """Executes ops one at a time on named buffers."""

    name: str  # as stored with a result, e.g. "packed" or "faulty(packed, scale:1.02@L07.ffn.down)"
    dtype: Any  # of activations and KV cache

    def execute(self, op: Op, state: State) -> None:
        """Read `op.reads`, write `op.writes`. Raises KeyError for a missing buffer."""
        ...
