"""The driver for emulated cores, and a small model in every scheme and layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.formats import open_checkpoint
from engine.formats.blocks import TYPES
from engine.formats.checkpoint import Checkpoint, TensorInfo
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.native.build import build, cache_folder
from engine.native.compilers import Target, zig_compiler
from engine.package import Package, build_package

EMULATOR = "qemu-aarch64-static"
DRIVER = Path(__file__).with_name("driver.c")
SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")  # types that the writer of GGUF cannot make


@pytest.fixture(scope="session")
def driver() -> Path:
    """The driver as a static program for aarch64."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {EMULATOR} (Debian: qemu-user-static)")
    zig = zig_compiler()
    if zig is None:
        pytest.skip("needs the ziglang package")
    return build(Target("aarch64", "musl"), zig, cache_folder(), program=DRIVER)


@pytest.fixture(scope="session")
def package_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Package]:
    """`package_of("Q4_0 interleaved")`: a ggml type, a scheme to quantise to, or "qwen2", "qwen3";
    and a layout."""
    folder = tmp_path_factory.mktemp("packages")
    opened: dict[str, Package] = {}

    def make(name: str) -> Package:
        if name not in opened:
            kind, layout = name.split()
            path = folder / f"{kind}-{layout}.pkg"
            scheme = kind if kind.startswith("w") else None
            build_package(checkpoint(kind, folder), path, name=kind, layout=layout, scheme=scheme)
            opened[name] = Package.open(path)
        return opened[name]

    return make


def checkpoint(kind: str, folder: Path) -> Checkpoint:
    """One layer; 259 tokens, so that the last block of 16 rows is not full."""
    if kind in SUPER_BLOCKS:
        return SuperBlocks(kind)
    family = kind if kind.startswith("qwen") else "llama"
    source = SyntheticCheckpoint(
        seed=7, family=family, layers=1, width=128, heads=4, kv_heads=2, ffn=192, vocab=259,
        context=4096,
    )  # fmt: skip
    if kind.startswith("w") or kind == "F32":
        return source
    path = folder / f"{kind}.gguf"
    matrices = [name for name, info in source.tensors.items() if len(info.shape) > 1]
    ggml = "Q8_0" if family != "llama" else kind
    write_gguf(source, path, types=dict.fromkeys(matrices, ggml))
    return open_checkpoint(path)


class SuperBlocks(SyntheticCheckpoint):
    """Matrices of random blocks of 256 inputs, scaled so that outputs are of the order of 1."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            seed=7, layers=1, width=256, heads=4, kv_heads=1, ffn=256, vocab=259, context=4096
        )
        self.kind = kind
        for name, info in list(self.tensors.items()):
            if len(info.shape) > 1:
                count = info.shape[0] * info.shape[1] // 256
                nbytes = count * TYPES[kind].nbytes
                self._tensors[name] = TensorInfo(name, info.shape, kind, nbytes)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        info = self.tensors[name]
        if info.type != self.kind:
            return super().raw(name)
        random = np.random.default_rng(len(name))
        count = info.shape[0] * info.shape[1] // 256
        raw = random.integers(0, 256, (count, TYPES[self.kind].nbytes), np.uint8)
        levels = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 64}[self.kind]
        scale = random.uniform(0.5, 1.5, count) / (64 * levels * 16)
        # The minimum is about what the mean of the codes is.
        centred = {0: scale, 2: scale * levels / 2}
        halves = {208: scale} if self.kind == "Q6_K" else centred
        for at, values in halves.items():
            raw[:, at : at + 2] = values.astype(np.float16)[:, None].view(np.uint8)
        return raw.reshape(info.shape[0], -1)
