"""Finds a unit by its name, and plants faults in it when the environment asks for that."""

from __future__ import annotations

import importlib
import os
import pkgutil
from typing import Any, cast

import engine.units
from engine.package import Package
from engine.units.base import Unit

FAULT_VARIABLE = "ENGINE_FAULT"


def unit_names() -> list[str]:
    """Modules of engine.units that can be asked for by name."""
    helpers = {"base", "loading", "faulty", "miscalculating", "conditions"}
    names = (module.name for module in pkgutil.iter_modules(engine.units.__path__))
    return sorted(set(names) - helpers)


def load_unit(name: str, package: Package, *, context: int | None = None, **options: Any) -> Unit:
    """Unit `name` for one package; `context` bounds the positions it will see (default: the
    model's own).

    With `ENGINE_FAULT` set, the unit is wrapped by the faulty one, which says so in its name.
    Raises ValueError for an unknown name or fault.
    """
    if name not in unit_names():
        raise ValueError(f"unit {name!r} is not known; known: {', '.join(unit_names())}")
    positions = package.hyperparameters.context if context is None else context
    module = importlib.import_module(f"engine.units.{name}")
    unit = cast(Unit, module.create(package, context=positions, **options))
    fault = os.environ.get(FAULT_VARIABLE)
    if not fault:
        return unit
    from engine.units.faulty import plant  # only where a fault is asked for

    return plant(unit, fault)
