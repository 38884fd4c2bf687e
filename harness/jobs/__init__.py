"""The stages of a bring-up: `plan` on the host, run on the board, `judge` on the host."""

from __future__ import annotations

import importlib
import pkgutil

from harness.jobs.base import Stage


def stages() -> list[Stage]:
    """Every module of this folder that has a `STAGE`, in the order that a bring-up runs them."""
    found: list[Stage] = []
    for module in pkgutil.iter_modules(__path__):
        stage = getattr(importlib.import_module(f"{__name__}.{module.name}"), "STAGE", None)
        if stage is not None:
            found.append(stage)
    return sorted(found, key=lambda stage: (stage.order, stage.name))
