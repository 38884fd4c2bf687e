"""Small models in every scheme, made once per session."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from engine.formats import open_checkpoint
from engine.formats.checkpoint import Checkpoint
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import Package, build_package

# Part of a tensor's name in GGUF → in Transformers' checkpoints.
TRANSFORMERS_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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


@pytest.fixture(scope="session")
def write_safetensors() -> Callable[..., Path]:
    """`(model, folder, config, *, reorder=True)`: a folder with config.json and the weights."""
    return _write_safetensors


def _halves(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k (H*D, …) from GGUF's order (neighbouring pairs) to that of halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # (H, D/2, 2, …)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _write_safetensors(
    model: SyntheticCheckpoint, folder: Path, changes: Mapping[str, Any], *, reorder: bool = True
) -> Path:
    """The model as Transformers would save it; `reorder` False leaves q and k as GGUF has them."""
    prefix = f"{model.metadata['general.architecture']}."
    get = {key.removeprefix(prefix): value for key, value in model.metadata.items()}.__getitem__
    reorder = reorder and prefix == "llama."  # the other families' files rotate halves already
    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    tensors = {}
    for name in model.tensors:
        values = model.float32(name)
        if name == "rope_freqs.weight":
            continue
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            if part in ("attn_q", "attn_k") and reorder:
                values = _halves(values, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{TRANSFORMERS_NAMES[part]}.{kind}"
        else:
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
                "output.weight": "lm_head.weight",
            }[name]
        tensors[name] = values
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": model.family,
        "hidden_act": "silu",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "vocab_size": get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_output.bias" in model.tensors,
        **({"sliding_window": None} if model.family == "mistral" else {}),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
