"""The models that are measured, as GGUF files that both engines read; made once, kept in a cache.

- `135m-q4_1`: the demonstration model as it is; `135m-q4_0`, `135m-q8_0`: the same weights,
  quantised again from its dequantised values
- `1b-q4_0`, `1b-q4_k_m`, `1b-q8_0`: the shape of a model of a billion parameters, random weights
- `tiny-…`: the same recipes in small, for trying the benchmarks out
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats import open_checkpoint
from engine.formats.blocks import dequantise
from engine.formats.checkpoint import Checkpoint, FormatError, TensorInfo
from engine.formats.gguf_writer import write_gguf
from engine.package import build_package
from harness.deploy.cache import locked, sha256_file
from harness.deploy.models import demo_model, packer_version

from .blocks import random_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_cpp.npz"
LOGIT_SPREAD = 3.0  # standard deviation of the logits, so that the best token stands out
SEED = 1
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int


BILLION = Shape(16, 2048, 32, 8, 8192, 32000, 8192)
TINY = Shape(4, 256, 4, 2, 512, 512, 1024)


def q4_k_m(name: str, layers: int) -> str:
    """The type llama.cpp's Q4_K_M recipe gives a tensor: Q6_K for the output matrix, and for half
    of the value and down projections (`use_more_bits` in its `llama-quant.cpp`)."""
    if name == "output.weight":
        return "Q6_K"
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


class RandomBlocks:
    """A llama model of random blocks; see `Checkpoint`. `kind` is a ggml type, or "Q4_K_M"."""

    format = "synthetic"
    tokenizer: Mapping[str, Any] | None = None

    def __init__(self, shape: Shape, kind: str, seed: int = SEED) -> None:
        self.path = Path(f"random-{shape.layers}x{shape.width}-{kind}-{seed}")
        self._seed = seed
        head_dim = shape.width // shape.heads
        self.metadata: Mapping[str, Any] = {
            "general.architecture": "llama",
            "general.name": self.path.name,
            "llama.block_count": shape.layers,
            "llama.context_length": shape.context,
            "llama.embedding_length": shape.width,
            "llama.feed_forward_length": shape.ffn,
            "llama.attention.head_count": shape.heads,
            "llama.attention.head_count_kv": shape.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": head_dim,
            "llama.rope.freq_base": 10000.0,
            "llama.vocab_size": shape.vocab,
        }
        self._deviations: dict[str, float] = {}
        found: dict[str, TensorInfo] = {}

        def add(name: str, outputs: int, inputs: int, deviation: float = 0.0) -> None:
            chosen = q4_k_m(name, shape.layers) if kind == "Q4_K_M" else kind
            # So that outputs have unit variance when inputs have.
            self._deviations[name] = deviation or 1 / math.sqrt(inputs)
            nbytes = random_rows(chosen, (1, inputs), 1.0, "size").nbytes * outputs
            found[name] = TensorInfo(name, (outputs, inputs), chosen, nbytes)

        def norm(name: str) -> None:
            found[name] = TensorInfo(name, (shape.width,), "F32", 4 * shape.width)

        kv = shape.kv_heads * head_dim
        add("token_embd.weight", shape.vocab, shape.width, 1.0)
        for layer in range(shape.layers):
            block = f"blk.{layer}."
            norm(block + "attn_norm.weight")
            add(block + "attn_q.weight", shape.width, shape.width)
            add(block + "attn_k.weight", kv, shape.width)
            add(block + "attn_v.weight", kv, shape.width)
            add(block + "attn_output.weight", shape.width, shape.width)
            norm(block + "ffn_norm.weight")
            add(block + "ffn_gate.weight", shape.ffn, shape.width)
            add(block + "ffn_up.weight", shape.ffn, shape.width)
            add(block + "ffn_down.weight", shape.width, shape.ffn)
        norm("output_norm.weight")
        add("output.weight", shape.vocab, shape.width, LOGIT_SPREAD / math.sqrt(shape.width))
        self.tensors: Mapping[str, TensorInfo] = found

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        info = self._info(name)
        if len(info.shape) == 1:
            return np.ones((1, info.shape[0]), np.float32).view(np.uint8)
        outputs, inputs = info.shape
        seed = f"{self._seed}\0{name}"
        return random_rows(info.type, (outputs, inputs), self._deviations[name], seed)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        info = self._info(name)
        return dequantise(self.raw(name), info.type, info.shape[-1]).reshape(info.shape)

    def close(self) -> None:
        """Nothing is held open."""

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise FormatError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]


@dataclasses.dataclass(frozen=True)
class Model:
    """`tokens` is a text long enough for the context: real where the model has a language."""

    name: str
    path: Path
    sha256: str
    context: int
    tokens: tuple[int, ...]


RANDOM = {
    f"{size}-{kind.lower()}": (shape, kind)
    for size, shape in (("1b", BILLION), ("tiny", TINY))
    for kind in ("Q4_0", "Q4_K_M", "Q8_0")
}
REQUANTISED = {"135m-q4_0": "Q4_0", "135m-q8_0": "Q8_0"}
NAMES = ("135m-q4_1", *REQUANTISED, *RANDOM)


def prepare(name: str, cache: Path, log: Log) -> Model:
    """The model of that name, made in `cache` when it is not there.

    Raises ValueError for an unknown name, HarnessError when the demonstration model cannot be had.
    """
    if name not in NAMES:
        raise ValueError(f"model {name!r} is not known; known: {', '.join(NAMES)}")
    if name in RANDOM:
        shape, kind = RANDOM[name]
        recipe = [dataclasses.asdict(shape), kind, SEED]
        path = _made(name, recipe, cache, log, lambda to: write_gguf(RandomBlocks(shape, kind), to))
        rng = np.random.Generator(np.random.Philox(SEED))
        tokens = rng.integers(0, shape.vocab, shape.context).tolist()
        return Model(name, path, _hash(path), shape.context, tuple(tokens))
    demo = demo_model()
    if name in REQUANTISED:
        kind = REQUANTISED[name]
        recipe = [_hash(demo), kind]
        path = _made(name, recipe, cache, log, lambda to: _requantise(demo, kind, to))
    else:
        path = demo
    checkpoint = open_checkpoint(path)
    context = int(checkpoint.metadata["llama.context_length"])
    checkpoint.close()
    return Model(name, path, _hash(path), context, _text(context))


def package(model: Model, cache: Path, log: Log, *, layout: str) -> Path:
    """The package of a model in one weight layout, without loss.

    Made once by each version of the packer; older versions' are removed.
    """
    stem = f"{model.name}-{model.sha256[:12]}-{layout}"
    path = cache / f"{stem}-{packer_version()[:12]}.package"
    with locked(cache / f".{stem}.lock"):
        if not path.is_file():
            log(f"packing {model.name}, layout {layout}")
            for old in cache.glob(f"{stem}-*.package"):
                old.unlink()
            checkpoint = open_checkpoint(model.path)
            try:
                build_package(checkpoint, path, name=model.name, layout=layout)
            finally:
                checkpoint.close()
    return path


def _made(
    name: str, recipe: list[Any], cache: Path, log: Log, write: Callable[[Path], None]
) -> Path:
    sources = b"".join((Path(__file__).parent / f"{part}.py").read_bytes() for part in _SOURCES)
    key = hashlib.sha256(json.dumps(recipe).encode() + sources).hexdigest()[:12]
    path = cache / f"{name}-{key}.gguf"
    with locked(cache / f".{name}.lock"):
        if not path.is_file():
            log(f"writing model {name}")
            for old in cache.glob(f"{name}-*.gguf"):
                old.unlink()
            partial = path.with_suffix(".partial")
            try:
                write(partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    return path


_SOURCES = ("blocks", "models")  # what shapes a file


def _requantise(source: Path, kind: str, to: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(source)
    try:
        types = {info.name: kind for info in checkpoint.tensors.values() if info.type == "Q4_1"}
        write_gguf(checkpoint, to, types=types)
    finally:
        checkpoint.close()


def _text(count: int) -> tuple[int, ...]:
    """The golden texts, one behind the other and again, as ids of the demonstration model."""
    with np.load(GOLDEN, allow_pickle=False) as file:
        names = sorted(name for name in file.files if name.startswith("text/"))
        parts = [file[name] for name in names if name.endswith("/tokens")]
    return tuple(np.resize(np.concatenate(parts), count).tolist())


_hashes: dict[Path, str] = {}


def _hash(path: Path) -> str:
    if path not in _hashes:
        _hashes[path] = sha256_file(path)
    return _hashes[path]
