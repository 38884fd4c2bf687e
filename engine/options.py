"""How a decoder runs: which unit, which executor, which precision. One record for every caller.

It crosses to boards inside a run's spec, so it is read strictly: an unknown field or value is an
error that names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

EXECUTORS = ("sync", "async", "compiled")
ACTIVATIONS = ("float", "int8")
KV_SCHEMES = ("f32", "f16", "int8", "int4")
KV_LAYOUTS = ("numpy", "sd", "ds", "mixed")


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Everything about a decoder that is not its model.

    `activations` "int8" quantises what goes into quantised weights, per token and 32 inputs, but
    not in `float_layers` ("L03", "head").
    `fused` applies the fusion passes except `passes_off`. `keep` None refuses tokens beyond the
    context; a number keeps so many positions at the start and lets the rest be a ring.
    `kernels` names an instruction set of the native unit in place of its own choice.
    `huge_pages` copies the weights into huge pages, where the kernel gives them. `threads` None
    leaves the count to the caller's environment (one, or the board's ladder).
    """

    unit: str = "packed"
    executor: str = "sync"
    activations: str = "float"
    fused: bool = False
    passes_off: tuple[str, ...] = ()
    kv: str = "f32"
    kv_layout: str = "numpy"
    threads: int | None = None
    huge_pages: bool = False
    keep: int | None = None
    kernels: str | None = None
    float_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("executor", self.executor, EXECUTORS)
        _one_of("activations", self.activations, ACTIVATIONS)
        _one_of("kv", self.kv, KV_SCHEMES)
        _one_of("kv_layout", self.kv_layout, KV_LAYOUTS)
        if not isinstance(self.unit, str) or not self.unit:
            raise ValueError(f"engine option unit is {self.unit!r}, expected a unit's name")
        for name in ("fused", "huge_pages"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"engine option {name} is {getattr(self, name)!r}, expected true or false"
                )
        for name, least in (("threads", 1), ("keep", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(
                    f"engine option {name} is {value!r}, expected a whole number of at least "
                    f"{least}, or nothing"
                )
        if self.kv_layout == "numpy" and self.kv != "f32":
            raise ValueError(
                f"engine option kv is {self.kv!r} in the layout of plain arrays, which holds f32 "
                "alone; choose kv_layout sd, ds or mixed"
            )
        if self.executor == "compiled" and self.unit != "native":
            raise ValueError(
                f"engine option executor is 'compiled' with unit {self.unit!r}; only the native "
                "unit is compiled: choose unit native, or executor sync or async"
            )

    @staticmethod
    def for_unit(unit: str) -> EngineOptions:
        """What a unit runs best with: the native one compiled, fused and in few bytes."""
        if unit != "native":
            return EngineOptions(unit=unit)
        return EngineOptions(
            unit="native",
            executor="compiled",
            activations="int8",
            fused=True,
            kv="f16",
            kv_layout="mixed",
        )

    @staticmethod
    def from_mapping(raw: Mapping[str, Any]) -> EngineOptions:
        """`raw` over the defaults of its unit. Raises ValueError naming the field."""
        fields = {field.name for field in dataclasses.fields(EngineOptions)}
        unknown = sorted(set(raw) - fields)
        if unknown:
            raise ValueError(
                f"engine option {unknown[0]!r} is not known; known: {', '.join(sorted(fields))}"
            )
        values = dict(raw)
        for name in ("passes_off", "float_layers"):
            off = values.get(name, ())
            if isinstance(off, str) or not all(isinstance(item, str) for item in off):
                raise ValueError(f"engine option {name} is {off!r}, expected a list of names")
            values[name] = tuple(off)
        return dataclasses.replace(EngineOptions.for_unit(values.get("unit", "packed")), **values)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON, whole: `from_mapping` gives the same options back."""
        lists = {"passes_off": list(self.passes_off), "float_layers": list(self.float_layers)}
        return {**dataclasses.asdict(self), **lists}


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"engine option {name} is {value!r}, expected one of {', '.join(known)}")
