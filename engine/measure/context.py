"""What a job on a board is given, and how it tells what it found."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from engine.options import EngineOptions
from engine.records import RunSpec

if TYPE_CHECKING:
    from engine.decode import Decoder
    from engine.package import Package
    from engine.units import Unit

Emit = Callable[[str, Mapping[str, Any]], None]


class JobError(ValueError):
    """A job that was asked for something it cannot do: says found and expected."""


@dataclasses.dataclass
class JobContext:
    """One attempt of one job. `run_started_ns` is CLOCK_MONOTONIC at the start of the whole run,
    which earlier attempts belong to; a job that restarts goes on from there."""

    spec: RunSpec
    package: Package | None
    spool: Path
    attempt: int
    run_started_ns: int
    sink: Emit
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    _inputs: dict[str, Any] | None = None
    _unit: Unit | None = None

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send one event; numbers that JSON cannot hold (NaN, infinities) become null."""
        self.sink(kind, plain(data))

    def data(self, name: str, value: Any) -> None:
        """One finding, as any JSON."""
        self.emit("data", {"name": name, "value": value})

    def progress(self, done: float, total: float, message: str = "") -> None:
        self.emit("progress", {"done": done, "total": total, "message": message})

    def log(self, message: str) -> None:
        self.emit("log", {"message": message})

    def array(self, name: str, **arrays: Any) -> None:
        """Write arrays (any shape) to the spool as NAME.npz and announce them by hash."""
        from engine.spool import save_arrays

        self.emit("array", save_arrays(self.spool, name, arrays))

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays of the spec's input file, each loaded once; empty when it has none."""
        if self._inputs is None:
            self._inputs = {}
            if self.spec.inputs is not None:
                with np.load(self.spec.inputs, allow_pickle=False) as file:
                    self._inputs = {name: file[name] for name in file.files}
        return self._inputs

    def require(self, name: str) -> Any:
        """An input array. Raises JobError when the host did not send it."""
        if name not in self.inputs:
            raise JobError(
                f"job {self.spec.job}: input array {name!r} is missing, found {sorted(self.inputs)}"
            )
        return self.inputs[name]

    def parameter(self, name: str, default: Any = None) -> Any:
        """A parameter of the spec. Raises JobError when it has neither value nor default."""
        value = self.spec.parameters.get(name, default)
        if value is None:
            raise JobError(
                f"job {self.spec.job}: parameter {name!r} is missing, "
                f"found {sorted(self.spec.parameters)}"
            )
        return value

    def unit(self) -> Unit:
        """The spec's unit, made once. Raises JobError when there is no package."""
        from engine.decode import unit_of

        if self._unit is None:
            self._unit = unit_of(self._package(), self.options)
        return self._unit

    def decoder(self, context: int | None = None, **changes: Any) -> Decoder:
        """A decoder of the spec's package and engine options, `changes` of them made.

        Raises JobError when there is no package, OverBudget before any weight is read when the
        model does not fit this board.
        """
        from engine.decode import Decoder
        from engine.measure.memory import require_fits

        options = dataclasses.replace(self.options, **changes)
        most = self._package().hyperparameters.context
        require_fits(self._package(), options, most if context is None else context)
        unit = self.unit() if options == self.options else None
        return Decoder(self._package(), options=options, context=context, with_unit=unit)

    def _package(self) -> Package:
        if self.package is None:
            raise JobError(f"job {self.spec.job}: the spec names no package")
        return self.package

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, earlier attempts included."""
        return (time.monotonic_ns() - self.run_started_ns) / 1e9


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy numbers unwrapped, non-finite floats as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
