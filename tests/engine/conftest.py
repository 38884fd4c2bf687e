"""Small models in every scheme, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from engine.formats import open_checkpoint
from engine.formats.checkpoint import Checkpoint
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import Package, build_package

# ggml type of the layers' weights → scheme of the package
SCHEMES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4"}


def write_gguf(source: SyntheticCheckpoint, path: Path, kind: str) -> None:
    """`source` as a GGUF file whose matrices are of ggml type `kind`, by the gguf library."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in source.metadata.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, info in source.tensors.items():
        values = source.float32(name)
        if len(info.shape) == 1 or kind == "F32":
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(values, quantisation)
            writer.add_tensor(name, data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
            write_gguf(SyntheticCheckpoint(seed=5, ffn=160), path, kind)
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
