"""Buffers that are allocated ahead of a step and written in place, as on a board.

Who reads too early reads what lay there before. Buffers may share memory: then that is another
buffer's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.program.conflicts import Memory
from engine.program.ops import Program
from engine.program.shapes import BufferShape, Shaped, buffer_shapes
from engine.runtime.arena import ALIGNMENT, Span, plan
from engine.runtime.state import Buffer, State


def shared_memory(program: Program, tensors: Mapping[str, Shaped], itemsize: int) -> Memory:
    """Where each buffer lies when a place is used again after its last reader: bytes of one row."""
    shapes = buffer_shapes(program, tensors)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, op in enumerate(program.ops):
        for name in (*op.reads, *op.writes):
            if name in shapes:
                first.setdefault(name, number)
                last[name] = number
    last[program.output] = len(program.ops)
    size = {name: shapes[name].width * itemsize for name in first}
    layout = plan([Span(name, size[name], first[name], last[name]) for name in first])
    return {name: (at, at + size[name]) for name, at in layout.offsets.items()}


class Slots:
    """A place for every buffer of a program, of which a step uses the first T or R rows.

    `memory` says which buffers share theirs, in bytes of one row.
    """

    def __init__(
        self, program: Program, tensors: Mapping[str, Shaped], dtype: Any, memory: Memory
    ) -> None:
        self._dtype = np.dtype(dtype)
        shapes = buffer_shapes(program, tensors)
        written = {name for op in program.ops for name in op.writes} - set(program.caches)
        self._shapes: dict[str, BufferShape] = {name: shapes[name] for name in written}
        self._memory = {name: place for name, place in memory.items() if name in written}
        self._inputs = program.inputs
        self._arrays: State = {}
        self._rows = 0

    def fits(self, tokens: int, rows: int) -> bool:
        return max(tokens, rows) <= self._rows

    def grow(self, tokens: int, rows: int) -> None:
        """Room for T and R rows, all zero. Nothing may be running."""
        self._rows = max(tokens, rows, self._rows)
        stop = max((stop for _, stop in self._memory.values()), default=0)
        block = np.zeros(stop * self._rows + ALIGNMENT, np.uint8)
        block = block[-block.ctypes.data % ALIGNMENT :]
        for name, shape in self._shapes.items():
            if name in self._memory:
                self._arrays[name] = self._placed(block, name, shape.width)
            else:
                self._arrays[name] = np.zeros((self._rows, shape.width), self._dtype)
        for name in self._inputs:
            self._arrays[name] = np.zeros(self._rows, np.int64)

    def _placed(self, block: npt.NDArray[np.uint8], name: str, width: int) -> Buffer:
        start = self._memory[name][0] * self._rows
        nbytes = width * self._dtype.itemsize * self._rows
        values: Buffer = block[start : start + nbytes].view(self._dtype)
        return values.reshape(self._rows, width)

    def view(self, name: str, tokens: int, rows: int) -> Buffer:
        """The rows of a step of T tokens, R of whose logits are wanted."""
        shape = self._shapes.get(name)
        selected = name == "rows" if shape is None else shape.rows == "R"
        return self._arrays[name][: rows if selected else tokens]

    def put(self, name: str, values: Buffer) -> None:
        self._arrays[name][: len(values)] = values

    def spill(self, source: str, target: str) -> None:
        """Write what lies at `source` over `target`, repeated or cut to its size: a planted mistake
        does that."""
        values = self._arrays[target]
        values[...] = np.resize(self._arrays[source], values.shape)
