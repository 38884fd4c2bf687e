"""Which module of this folder reads a checkpoint."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

import engine.architectures
from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.program.ops import Program


class Family(Protocol):
    """The skeleton of a family module."""

    NAMES: tuple[str, ...]

    def read(self, checkpoint: Checkpoint) -> ModelLayout: ...

    def program(self, hp: Hyperparameters) -> Program: ...


def _families() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(engine.architectures.__path__):
        loaded = importlib.import_module(f"engine.architectures.{module.name}")
        for name in getattr(loaded, "NAMES", ()):
            found[name] = cast(Family, loaded)
    return found


def known_families() -> list[str]:
    """Names that a GGUF file or a config.json may give."""
    return sorted(_families())


def family_named(name: str) -> Family:
    """Raises FormatError listing the known families."""
    families = _families()
    if name not in families:
        raise FormatError(
            f"architecture {name!r} is not known; known: {', '.join(sorted(families))}"
        )
    return families[name]


def family_of(checkpoint: Checkpoint) -> Family:
    """Raises FormatError when the checkpoint names no architecture, or one that is not known."""
    key = "model_type" if checkpoint.format == "safetensors" else "general.architecture"
    name = checkpoint.metadata.get(key)
    if not isinstance(name, str):
        raise FormatError(f"{checkpoint.path}: {key} is {name!r}, expected the architecture's name")
    try:
        return family_named(name)
    except FormatError as error:
        raise FormatError(f"{checkpoint.path}: {key}: {error}") from None
