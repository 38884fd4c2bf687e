"""What an executor is: it runs the steps of one program on one unit.

sync, async and compiled executors give the same numbers for the same unit, bit by bit.
"""

from __future__ import annotations

from typing import Protocol

from engine.program.ops import Program
from engine.runtime.state import Buffer, State
from engine.runtime.trace import Taps, Trace


class Executor(Protocol):
    """`step` counts the steps since it was last set to 0; the decoder resets it.

    `parts` is the part of the board that each op of the program runs on, by the op's index. `trace`
    may be set between steps: what is there when a step begins is filled by it.
    """

    program: Program
    trace: Trace | None
    step: int
    parts: tuple[str, ...]

    def run(self, state: State, taps: Taps | None = None) -> Buffer:
        """One step. `state` holds the program's inputs and caches; returns the logits (R, V), which
        no later step changes.

        Raises NonFinite naming the first op, in program order, whose output is not finite.
        """
        ...

    def close(self) -> None:
        """End what it started; it cannot run afterwards. Closing twice does nothing."""
        ...
