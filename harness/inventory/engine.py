"""How the engine runs on a board: the keys of `engine:` in devices.yaml, and of --engine-option.

The values are those of engine.options.EngineOptions, written as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from engine.options import ACTIVATIONS, EXECUTORS, KV_LAYOUTS, KV_SCHEMES, EngineOptions
from harness.inventory.entry import Entry
from harness.inventory.scalars import Refused, Switch, describe, parse_switch, parse_whole

AUTO = "auto"


def parse_threads(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        count = parse_whole(value)
    except Refused as error:
        raise Refused(describe(value), "'auto' or a whole number") from error
    if not 1 <= count <= 1024:
        raise Refused(describe(value), "'auto' or a whole number from 1 to 1024")
    return count


def _one_of(known: Sequence[str]) -> BeforeValidator:
    def check(value: Any) -> str:
        if value not in known:
            raise Refused(describe(value), "one of " + ", ".join(known))
        return str(value)

    return BeforeValidator(check)


def _switch(value: Any) -> bool | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return parse_switch(value)
    except Refused as error:
        raise Refused(describe(value), "true, false, or auto to measure it") from error


def _unit(value: Any) -> str:
    from engine.units import unit_names  # numpy, only where a unit is named

    known = [AUTO, *sorted({"native", *unit_names()})]
    if value not in known:
        raise Refused(describe(value), "one of " + ", ".join(known))
    return str(value)


def _passes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise Refused(describe(value), "a list of fusion passes such as [qkv, residual]")
    return tuple(value)


def _layers(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise Refused(describe(value), "a list of layers such as [L00, head]")
    return tuple(value)


def _keep(value: Any) -> int:
    count = parse_whole(value)
    if not 0 <= count <= 1 << 20:
        raise Refused(describe(value), "a number of positions from 0 to 1048576")
    return count


class Engine(Entry):
    """What is asked of the engine; None leaves it to the unit. `unit` "auto": the native one, or
    numpy where no native code can be built for the board and nothing else is asked."""

    unit: Annotated[str, BeforeValidator(_unit)] = AUTO
    executor: Annotated[str, _one_of(EXECUTORS)] | None = None
    activations: Annotated[str, _one_of(ACTIVATIONS)] | None = None
    fused: Switch | None = None
    passes_off: Annotated[tuple[str, ...], BeforeValidator(_passes)] | None = None
    kv: Annotated[str, _one_of(KV_SCHEMES)] | None = None
    kv_layout: Annotated[str, _one_of((AUTO, *KV_LAYOUTS))] | None = None
    threads: Annotated[int | Literal["auto"], BeforeValidator(parse_threads)] | None = None
    huge_pages: Annotated[bool | Literal["auto"], BeforeValidator(_switch)] | None = None
    keep: Annotated[int, BeforeValidator(_keep)] | None = None
    kernels: str | None = None
    float_layers: Annotated[tuple[str, ...], BeforeValidator(_layers)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Engine:
        unit = "native" if self.unit == AUTO else self.unit
        try:
            EngineOptions.from_mapping({**self.asked, "unit": unit})
        except ValueError as error:
            raise Refused(str(error), "options that go together") from error
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """What is said, as EngineOptions take it; unit and threads that are left open are not."""
        return {name: value for name, value in self if value not in (None, AUTO)}

    def over(self, other: Engine) -> Engine:
        """This one's words, and those of `other` for what it leaves open: but what `other` asks of
        one unit says nothing about another."""
        if self.unit not in (AUTO, other.unit):
            return self
        return Engine(**{**_written(other), **_written(self)})


def _written(engine: Engine) -> dict[str, Any]:
    return {name: getattr(engine, name) for name in engine.model_fields_set}
