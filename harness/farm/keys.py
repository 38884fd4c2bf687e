"""What makes two runs comparable, beside engine, model and board: quantisation, build, clocks."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from engine.package import Package, PackageError

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.deploy.models import PreparedModel
    from harness.deploy.native import NativeBuild
    from harness.inventory import Board

_TOOLCHAIN_CHARACTERS, _MODE_CHARACTERS = 200, 100  # what the store's columns hold


def quant_hash(model: PreparedModel) -> str | None:
    """Names how the package holds its weights: each tensor's scheme, layout, group, shape and
    parts, and what was requantised. The same for two models that differ in nothing but the weights'
    values. None when the package cannot be read."""
    return _quant_hash(model.package, model.sha256)


@functools.lru_cache(maxsize=16)
def _quant_hash(path: Path, sha256: str) -> str | None:
    del sha256  # of the content, so that a file which was replaced is read anew
    try:
        package = Package.open(path)
    except PackageError:
        return None
    with package:
        tensors = [
            [
                tensor.name,
                tensor.scheme,
                list(tensor.shape),
                tensor.layout,
                tensor.group,
                tensor.zero,
                {name: str(part.dtype) for name, part in sorted(tensor.parts.items())},
            ]
            for _, tensor in sorted(package.tensors.items())
        ]
        text = json.dumps([tensors, list(package.notes)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def toolchain_name(board: Board, native: NativeBuild | None = None) -> str | None:
    """What native code was built with, "zig 0.13.0 aarch64-linux-gnu.2.31 cortex_a76"; None for
    none, and as devices.yaml says it before anything was built."""
    found = board.toolchain
    words: list[str | None]
    if native is not None:
        words = [native.compiler, native.target]
        words += [found.cpu, *found.flags] if found is not None else []
    elif found is not None:
        words = [found.kind, found.target, found.command, found.cpu, *found.flags]
    else:
        return None
    return " ".join(word for word in words if word)[:_TOOLCHAIN_CHARACTERS]


def power_mode(facts: Facts | None) -> str | None:
    """How the cores' clocks are governed, as the board told; None where it did not."""
    return (facts.governor if facts is not None else "")[:_MODE_CHARACTERS] or None
