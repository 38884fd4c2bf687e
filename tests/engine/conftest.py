"""Small models in every scheme, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.formats import open_checkpoint
from engine.formats.checkpoint import Checkpoint
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import Package, build_package


@pytest.fixture(scope="session")
def synthetic_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in float32, with a tokenizer."""
    path = tmp_path_factory.mktemp("packages") / "synthetic.pkg"
    build_package(SyntheticCheckpoint(seed=3), path, name="synthetic")
    return path


@pytest.fixture(scope="session")
def checkpoint_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Opens the same small model as a GGUF file of one ggml type."""
    folder = tmp_path_factory.mktemp("gguf")

    def make(kind: str) -> Checkpoint:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            source = SyntheticCheckpoint(seed=5, ffn=160)
            matrices = [name for name, info in source.tensors.items() if len(info.shape) > 1]
            write_gguf(source, path, types=dict.fromkeys(matrices, kind))
        return open_checkpoint(path)

    return make


@pytest.fixture(scope="session")
def package_in(
    checkpoint_in: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Package]:
    """The same small model as a package whose matrices came from one ggml type."""
    folder = tmp_path_factory.mktemp("schemes")

    def make(kind: str) -> Package:
        path = folder / f"{kind}.pkg"
        if not path.exists():
            build_package(checkpoint_in(kind), path, name=kind)
        return Package.open(path)

    return make
