"""Conditions of planted faults: the ways of running in which a fault is there.

`NAME=VALUE,…`, all of which must hold: NAME is an option of engine.options.EngineOptions, or `pass`
for a fusion pass that is applied, or `int8` for a layer (`L01`, `head`) with int8 activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from engine.options import EngineOptions

Condition = tuple[tuple[str, str], ...]  # (name, value)


def parse_condition(part: str, text: str) -> Condition:
    """The condition `text` of the fault `part`. Raises ValueError for what is none."""
    known = [*(field.name for field in dataclasses.fields(EngineOptions)), "pass", "int8"]
    found = []
    for piece in text.split(","):
        name, equals, value = piece.partition("=")
        if not equals or not value or name not in known:
            raise ValueError(
                f"ENGINE_FAULT: condition {piece!r} of {part!r}, expected NAME=VALUE with a name "
                f"of {', '.join(known)}"
            )
        found.append((name, value))
    return tuple(found)


def holds(condition: Sequence[tuple[str, str]], options: EngineOptions) -> bool:
    """Whether an engine with these options runs as a condition says."""
    return all(_holds(name, value, options) for name, value in condition)


def _holds(name: str, value: str, options: EngineOptions) -> bool:
    if name == "pass":
        return options.fused and value not in options.passes_off
    if name == "int8":
        return options.activations == "int8" and value not in options.float_layers
    found = getattr(options, name)
    said = {True: "true", False: "false"}.get(found, str(found)) if found is not None else "none"
    return value == said
