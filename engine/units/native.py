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
from engine.runtime.state import CacheOverflow, NonFinite, State

HALF_MAX = 65504.0
LEVELS = {"int8": 127, "int4": 7}


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
        self.lowering = Lowering(self.weights, package.hyperparameters)
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
        """Raises ValueError for an op that the kernels cannot do."""
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
        """See engine.units.base.Unit. Raises NonFinite or CacheOverflow (with step 0)."""
        place = _Arrays(op, state)
        commands = self.lowering.lower(op, place)
        array = (Command * len(commands))(*commands)
        step = step_of(state, place.rows)
        team = self.team()
        team.reserve(array, max(step.tokens, step.rows))
        failed = team.run(array, step)
        state.update({name: place.written[name] for name in op.writes if name in place.written})
        if failed:
            raise failure(op, state, step)


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
        views = self.state[keys], self.state[values]
        sequences = getattr(views[0], "sequences", 1)
        self._caches.append(cache_structure(*views, sequences, keys))
        return self._caches[-1]


def step_of(state: State, rows: int | None = None) -> Step:
    """The inputs of a step as the library takes them; keeps the arrays alive by itself.

    `rows` is how many the commands work on, where that is not the step's number of tokens.
    """
    step = Step()
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
            held.append(array)
            setattr(step, field, array.ctypes.data)
    step.held = held
    step.tokens = len(state["tokens"]) if rows is None else rows
    step.rows = len(state["rows"]) if "rows" in state else 0
    return step


def failure(op: Op, state: Mapping[str, Any], step: Step) -> NonFinite:
    """What an op's bad numbers are, from what it wrote."""
    if step.overflow:
        cache = state[op.appends[0]]
        scheme = getattr(cache, "scheme", "f32")
        limit = float(np.finfo(np.float32).max)
        if scheme != "f32":
            limit = HALF_MAX * LEVELS.get(scheme, 1)
        size = int(np.prod(cache.shape[1:])) * step.tokens * 2
        return CacheOverflow(op, 1, size, scheme, limit)
    outputs = [state[name] for name in op.writes if name not in op.appends and name in state]
    flat = np.concatenate([np.asarray(values).reshape(-1) for values in outputs])
    nans = int(np.isnan(flat).sum())
    count = int(flat.size - np.count_nonzero(np.isfinite(flat)))
    kind = "NaN" if nans == count else "infinite" if not nans else "NaN or infinite"
    return NonFinite(0, op, count, flat.size, kind)
