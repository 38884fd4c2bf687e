"""Which reader a model file needs, told by its content and not by its name."""

from __future__ import annotations

import os
from pathlib import Path

from engine.formats.checkpoint import Checkpoint, FormatError
from engine.formats.cursor import looks_like
from engine.formats.gguf import GgufCheckpoint, is_gguf


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a GGUF file (any part of a split one), a safetensors file, or a folder of either.

    Raises FormatError naming the path, what was found, and what was expected.
    """
    path = Path(os.path.expandvars(path)).expanduser()
    if path.is_dir():
        return _open_folder(path)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_gguf(head):
        return GgufCheckpoint.open(path)
    from engine.formats.safetensors import SafetensorsCheckpoint, is_safetensors

    if is_safetensors(head):
        return SafetensorsCheckpoint.open(path)
    if path.suffix == ".gguf" or not head:
        return GgufCheckpoint.open(path)  # says what is wrong with it
    kind = looks_like(head) or f"begins with {head[:8]!r}"
    raise FormatError(f"{path}: {kind}; expected a GGUF or safetensors model")


def _open_folder(path: Path) -> Checkpoint:
    from engine.formats.safetensors import SafetensorsCheckpoint

    if (path / "config.json").is_file():
        return SafetensorsCheckpoint.open(path)
    models = sorted(path.glob("*.gguf"))
    firsts = [model for model in models if "-of-" not in model.name] + [
        model for model in models if "-00001-of-" in model.name
    ]
    if len(firsts) == 1:
        return GgufCheckpoint.open(firsts[0])
    if firsts:
        names = ", ".join(model.name for model in firsts[:5])
        raise FormatError(f"{path}: holds {len(firsts)} GGUF models ({names}); name one of them")
    raise FormatError(
        f"{path}: the folder holds neither config.json with safetensors nor one GGUF model"
    )
