"""Runs the passes over a program, in their order, without those that are switched off."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from types import ModuleType

import engine.program.passes
from engine.program.ops import Program

HELPERS = {"applying", "linears"}


def _modules() -> dict[str, ModuleType]:
    """Name → module of each pass, in the order they run."""
    found = {
        info.name: importlib.import_module(f"engine.program.passes.{info.name}")
        for info in pkgutil.iter_modules(engine.program.passes.__path__)
        if info.name not in HELPERS
    }
    return dict(sorted(found.items(), key=lambda item: item[1].ORDER))


def pass_names() -> tuple[str, ...]:
    """The passes in the order they run."""
    return tuple(_modules())


def apply(program: Program, off: Collection[str] = ()) -> Program:
    """The program after all passes but those in `off`.

    Raises ValueError for a name in `off` that is no pass.
    """
    modules = _modules()
    unknown = sorted(set(off) - set(modules))
    if unknown:
        raise ValueError(f"pass {unknown[0]!r} is not known; known: {', '.join(modules)}")
    for name, module in modules.items():
        if name not in off:
            program = module.run(program)
    return program
