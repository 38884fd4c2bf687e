"""The native unit: every op by the C kernels of engine/native, over weights where they are mapped.

The kernels are those of the best instruction set that all allowed CPUs have, or of the one that
`kernels` or $ENGINE_KERNELS names. Results depend on the instruction set, not on threads, executor
or fusion.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.native.isa import Choice
from engine.native.library import KINDS, Cache, Command, Library, Step, load
from engine.native.lowering import QUANTISED, Lowering, cache_structure
from engine.native.team import Team
from engine.native.weights import Weights
from engine.package import Package
from engine.program.ops import Op, Program
from engine.runtime.cache import range_limit
from engine.runtime.state import CacheOverflow, State

LANES = 16  # floats that the kernels take at a time


def create(
    package: Package,
    *,
    context: int,
    threads: int = 1,
    kernels: str | None = None,
    huge_pages: bool = False,
    pin: Sequence[int] = (),
) -> Native:
    return Native(package, threads=threads, kernels=kernels, huge_pages=huge_pages, pin=pin)


class Native:
    """Executes ops by C kernels. `threads` work on one op; each thread of Python that executes ops
    has a team of its own, so that units may run side by side."""

    name = "native"
    dtype = np.float32

    def __init__(
        self,
        package: Package,
        *,
        threads: int,
        kernels: str | None,
        huge_pages: bool,
        pin: Sequence[int],
    ) -> None:
        self.package = package
        self.library: Library = load()
        self.choice: Choice = self.library.choose(kernels)
        self.threads, self.pin = threads, tuple(pin)
        self.weights = Weights(package, huge_pages=huge_pages)
        self.lowering = Lowering(self.weights, package.hyperparameters, self.library.name)
        self._teams = threading.local()
        self.kernels = self._kernels()

    def _kernels(self) -> Mapping[str, str]:
        """Which kernel runs each kind of op; a weight that misses the fast ones is told by name."""
        named = dict.fromkeys(KINDS, self.choice.name)
        named["all"] = self.choice.name
        slow = [
            tensor.name
            for tensor in self.package.tensors.values()
            if len(tensor.shape) == 2
            and tensor.scheme in QUANTISED
            and tensor.layout != "interleaved"
        ]
        if slow:
            more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
            named["linear"] = (
                f"{self.choice.name}, slow for {slow[0]}{more}: layout "
                f"{self.package.tensors[slow[0]].layout}, not interleaved"
            )
        return named

    def prepare(self, program: Program) -> None:
        """Raises ValueError for an op or a head that the kernels cannot do."""
        dim = self.package.hyperparameters.head_dim
        if dim % LANES:
            raise ValueError(
                f"{self.package.name}: heads of {dim} elements; the native attention needs a "
                f"multiple of {LANES}: choose unit packed"
            )
        for op in program.flat():
            if op.kind not in KINDS:
                raise ValueError(f"op {op.id}: the native unit has no kernel for {op.kind}")

    def team(self) -> Team:
        """The team of the calling thread."""
        team = getattr(self._teams, "team", None)
        if team is None:
            team = Team(self.library, self.choice.name, self.threads, self.pin)
            self._teams.team = team
        return team

    def warm_up(self) -> int:
        """Touch every page of the weights; returns their bytes."""
        return self.weights.touch(self.library)

    def execute(self, op: Op, state: State) -> None:
        """See engine.units.base.Unit. Raises CacheOverflow (with step 0)."""
        place = _Arrays(op, state)
        commands = self.lowering.lower(op, place)
        array = (Command * len(commands))(*commands)
        step = step_of(state, place.rows)
        team = self.team()
        team.reserve(array, max(step.tokens, step.rows))
        if team.run(array, step):
            finish(op, team, array, step, state)
        state.update({name: place.written[name] for name in op.writes if name in place.written})


class _Arrays:
    """Buffers of one op as numpy arrays of a state; what it writes is made on the way."""

    def __init__(self, op: Op, state: State) -> None:
        self.state = state
        self.written: dict[str, npt.NDArray[np.float32]] = {}
        self._read: dict[str, npt.NDArray[np.float32]] = {}
        self._caches: list[Cache] = []
        self.rows = len(state[op.reads[0]])  # T, or R behind the selection of rows
        self._made = len(state["rows"]) if op.kind == "select" else self.rows

    def _array(self, name: str) -> npt.NDArray[np.float32]:
        if name in self.written:
            return self.written[name]
        if name not in self._read:
            self._read[name] = np.ascontiguousarray(self.state[name], np.float32)
        return self._read[name]

    def read(self, name: str) -> int:
        return int(self._array(name).ctypes.data)

    def width(self, name: str) -> int:
        return int(self._array(name).shape[1])

    def write(self, name: str, width: int) -> int:
        self.written[name] = np.empty((self._made, width), np.float32)
        return int(self.written[name].ctypes.data)

    def cache(self, keys: str, values: str) -> Cache:
        self._caches.append(cache_structure(self.state[keys], self.state[values], keys))
        return self._caches[-1]


def step_of(state: State, rows: int | None = None) -> Step:
    """The inputs of a step as the library takes them; keeps the arrays alive by itself.

    `rows` is how many the commands work on, where that is not the step's number of tokens. Raises
    ValueError for an input with another number of rows.
    """
    step = Step()
    step.tokens = len(state["tokens"]) if rows is None else rows
    step.rows = len(state["rows"]) if "rows" in state else 0
    tokens = len(state["tokens"]) if "tokens" in state else step.tokens
    held = []
    for field, name in (
        ("ids", "tokens"),
        ("positions", "positions"),
        ("row_index", "rows"),
        ("slots", "slots"),
        ("starts", "starts"),
        ("visible", "visible"),
        ("prefix_positions", "prefix_positions"),
    ):
        if name in state:
            array = np.ascontiguousarray(state[name], np.int64)
            wanted = (step.rows if name == "rows" else tokens,)
            if array.shape != wanted:
                raise ValueError(f"input {name} has shape {array.shape}, expected {wanted}")
            held.append(array)
            setattr(step, field, array.ctypes.data)
    step.held = held
    return step


def finish(
    op: Op,
    team: Team,
    commands: Any,
    step: Step,
    state: State,
    within: tuple[int, int] | None = None,
) -> None:
    """Run all commands of an op that stopped at bad numbers: an executor then sees whether and
    where they show in what it writes. `within` are its first command and the one behind its last.

    Raises CacheOverflow (with step 0).
    """
    first, behind = within or (0, len(commands))
    number = first
    while number < behind and behind - first > 1 and not step.overflow:
        team.run(commands, step, number, 1)
        number += 1
    if not step.overflow:
        return
    append = next(part for part in op.parts if part.kind == "kv_append")
    cache = state[append.writes[0]]
    scheme = getattr(cache, "scheme", "f32")
    limit = range_limit(scheme) if scheme != "f32" else float(np.finfo(np.float32).max)
    size = int(np.prod(cache.shape[1:])) * step.tokens * len(append.writes)
    raise CacheOverflow(append, step.overflow, size, scheme, limit)
