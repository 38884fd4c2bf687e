"""Which class a crash is of: they are asked in a fixed order, and the first that knows says so.

They are found by file name: a new one is a file in `classes/`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

import harness.triage.classes
from harness.triage.finding import Class, Finding

if TYPE_CHECKING:
    from harness.triage.case import Case


@functools.cache
def classes() -> tuple[Class, ...]:
    """In the order in which they are asked."""
    found = []
    for module in pkgutil.iter_modules(harness.triage.classes.__path__):
        one = importlib.import_module(f"harness.triage.classes.{module.name}")
        if not isinstance(one, Class):
            raise TypeError(f"{one.__name__} has not NAME, ORDER, TITLE and recognise")
        found.append(one)
    return tuple(sorted(found, key=lambda one: one.ORDER))


def title(name: str) -> str:
    """The words for a class; its name for one of another version."""
    return next((one.TITLE for one in classes() if name == one.NAME), name)


def decide(case: Case) -> Finding | None:
    """The finding, None for a run that ended well."""
    for one in classes():
        found = one.recognise(case)
        if found is not None:
            return found
    return None
