"""A team of native threads: it runs command lists, one at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.native.library import Library, Step
from engine.runtime.trace import Trace

# What dn_run returns for a step that it does not run → why.
REFUSED = {
    -2: "it has more rows than were reserved",
    -3: "its ops rotate by different RoPE tables",
    -4: "a token, row or slot lies outside of what there is",
    -5: "its threads belong to the process that forked this one; make a decoder after the fork",
}


class Team:
    """Threads of the library, ended with the object. `pin[i]` is the CPU of helper thread i; the
    calling thread is the first and stays where it is."""

    def __init__(self, library: Library, isa: str, threads: int, pin: Sequence[int] = ()) -> None:
        self._functions = library.functions
        self.threads, self.isa = threads, isa
        cpus = None
        if pin:
            cpus = (ctypes.c_int32 * threads)(*(pin[i % len(pin)] for i in range(threads)))
        self._handle = self._functions.dn_team_create(threads, cpus, isa.encode())
        if not self._handle:
            raise MemoryError(f"a team of {threads} {isa} threads cannot be started")
        self._reserved: tuple[int, ...] = ()
        self._recorded = np.zeros(1, np.int64)

    def reserve(self, commands: Any, tokens: int) -> None:
        """Make room for `commands` with up to `tokens` rows. Nothing when there is enough."""
        needs = _needs(commands, tokens)
        if self._reserved and all(a >= b for a, b in zip(self._reserved, needs)):
            return
        needs = tuple(map(max, zip(self._reserved or needs, needs)))
        self._reserved = ()  # what there was is given back first
        if self._functions.dn_reserve(self._handle, (ctypes.c_int64 * 6)(*needs)):
            raise MemoryError(f"no memory for {tokens} rows of activations")
        self._reserved = needs

    def run(self, commands: Any, step: Step, first: int = 0, count: int | None = None) -> bool:
        """Run commands [first, first + count) of an array; True when one met bad numbers.

        Raises RuntimeError for a step that the library refuses; nothing of it ran.
        """
        if not self._handle:
            raise RuntimeError("the team of threads is closed")
        size = ctypes.sizeof(commands._type_)
        address = ctypes.addressof(commands) + first * size
        number = len(commands) - first if count is None else count
        result = self._functions.dn_run(self._handle, address, number, ctypes.byref(step))
        if result in REFUSED:
            raise RuntimeError(f"the native library refused a step: {REFUSED[result]}")
        return bool(result)

    def trace_into(self, trace: Trace | None, step: int) -> None:
        """Events of the following steps go into a trace's ring."""
        if trace is None:
            self._functions.dn_trace(self._handle, None, 0, None, 0)
            return
        self._recorded[0] = trace.recorded
        ring = trace.ring
        self._functions.dn_trace(
            self._handle, ring.ctypes.data, len(ring), self._recorded.ctypes.data, step
        )

    @property
    def recorded(self) -> int:
        """Events recorded by the trace so far."""
        return int(self._recorded[0])

    def close(self) -> None:
        """End the threads; again: nothing."""
        if self._handle:
            self._functions.dn_team_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _needs(commands: Any, tokens: int) -> tuple[int, ...]:
    """Tokens, widest input, head dimension, heads, heads of a group and slots of a command list."""
    width, dim, heads, group, slots = 32, 16, 1, 1, 1
    for command in commands:
        width = max(width, command.width)
        if command.heads:
            dim, heads = max(dim, command.head_dim), max(heads, command.heads)
            group = max(group, command.heads // command.kv_heads)
        if command.cache:
            slots = max(slots, command.cache.contents.slots)
    return tokens, width, dim, heads, group, slots
