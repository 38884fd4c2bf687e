"""A command list with everything that it points to, as one block that runs in another process.

For kernels of a machine that an emulator plays, where there is no Python. The block is laid out as
in this process; `relocations` say which of its words are pointers, and where in it they point to.
Structures are the same on all 64-bit machines that kernels are built for.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64


class Image:
    """Structures and the arrays they point to, as one block that can be moved."""

    def __init__(self) -> None:
        self.block = bytearray()
        self.relocations: list[tuple[int, int]] = []
        self._arrays: list[tuple[int, int, int]] = []  # address, bytes, offset
        self._structures: dict[int, int] = {}  # address → offset

    def _place(self, data: bytes | memoryview) -> int:
        self.block += bytes(-len(self.block) % ALIGNMENT)
        offset = len(self.block)
        self.block += data
        return offset

    def array(self, array: npt.NDArray[Any]) -> int:
        """Take an array in, before the structures that point into it."""
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of strides {array.strides}, expected a contiguous one")
        offset = self._place(array.tobytes())
        self._arrays.append((int(array.ctypes.data), array.nbytes, offset))
        return offset

    def structure(self, value: ctypes.Structure) -> int:
        """Take a structure in, and those that it points to; its address in the image."""
        address = ctypes.addressof(value)
        if address not in self._structures:
            offset = self._structures[address] = self._place(bytes(value))
            self._pointers(value, offset)
        return self._structures[address]

    def commands(self, values: Any) -> int:
        """An array of structures, one behind the other."""
        offset = self._place(bytes(values))
        for at, value in enumerate(values):
            self._pointers(value, offset + at * ctypes.sizeof(value))
        return offset

    def _pointers(self, value: ctypes.Structure, offset: int) -> None:
        for name, kind in value._fields_:  # type: ignore[misc]  # no field has a width
            at = offset + getattr(type(value), name).offset
            self._pointer(kind, getattr(value, name), at)

    def _pointer(self, kind: Any, value: Any, at: int) -> None:
        if issubclass(kind, ctypes.Array):
            for number in range(kind._length_):
                self._pointer(kind._type_, value[number], at + number * 8)
        elif kind is ctypes.c_void_p and value:
            self.relocations.append((at, self._target(value)))
        elif issubclass(kind, ctypes._Pointer) and value:
            self.relocations.append((at, self.structure(value.contents)))

    def _target(self, address: int) -> int:
        for start, size, offset in self._arrays:
            if start <= address < start + size:
                return offset + address - start
        raise ValueError(f"a pointer to {address:#x}, which is in no array of the image")


def case(
    image: Image, commands: int, count: int, step: int, threads: int, needs: Sequence[int], isa: str
) -> bytes:
    """What the driver reads: `count` commands and the step at their offsets in `image`, what
    dn_reserve is asked for, and the instruction set."""
    moves = np.array(image.relocations, np.int64).reshape(-1, 2)
    numbers = (len(image.block), len(moves), commands, count, step, threads, *needs)
    return struct.pack("<12q16s", *numbers, isa.encode()) + moves.tobytes() + bytes(image.block)


def answers(data: bytes, images: Sequence[Image]) -> list[tuple[int, memoryview]]:
    """What the driver wrote: the result of each case's call, and its image afterwards.

    Raises ValueError when it is not that.
    """
    whole, at, found = memoryview(data), 0, []
    for image in images:
        (result,) = struct.unpack_from("<q", data, at)
        found.append((result, whole[at + 8 : at + 8 + len(image.block)]))
        at += 8 + len(image.block)
    if at != len(data):
        raise ValueError(f"{len(data)} bytes of answers to {len(images)} cases, expected {at}")
    return found
