"""The same weights as a GGUF file and as safetensors give the same logits.

The two differ in what they hold: GGUF keeps the rows of q and k in the order of neighbouring RoPE
pairs, safetensors in that of halves, and each names tensors and RoPE scaling in its own way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint, open_checkpoint
from engine.formats.gguf_writer import write_gguf
from engine.package import Package, build_package

Array = npt.NDArray[np.float32]
CONTEXT = 128
ORIGINAL = 32  # the context before scaling; tokens reach beyond it
TOKENS = np.array([(5 + 29 * index + index * index) % 253 for index in range(64)], np.int64)
NAMES = {
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
HEADS = {
    "as many key/value heads": {"heads": 4, "kv_heads": 4},
    "shared key/value heads": {"heads": 6, "kv_heads": 2, "width": 96},
    "32 heads and 4 key/value heads": {"heads": 32, "kv_heads": 4, "width": 256},
    "one key/value head": {"heads": 4, "kv_heads": 1},
    "heads wider than the model": {"heads": 4, "kv_heads": 2, "head_dim": 32},
    "tied": {"heads": 4, "kv_heads": 2, "tied": True},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def llama3_divisors(head_dim: int, theta: float, factor: float) -> list[float]:
    """What a converter puts into `rope_freqs.weight` (low factor 1, high factor 4)."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < ORIGINAL / 4:
            divisors.append(1.0)
        elif wavelength > ORIGINAL:
            divisors.append(factor)
        else:
            smooth = (ORIGINAL / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


# RoPE variant → (how GGUF says it, how config.json says it)
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "linear": (
        {"rope": {"scaling.type": "linear", "scaling.factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama3": (
        {"rope_divisors": llama3_divisors(16, 10000.0, 8.0)},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
            }
        },
    ),
    "yarn": (
        {
            "rope": {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": ORIGINAL,
            }
        },
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
            }
        },
    ),
}


def halves(rows: Array, heads: int) -> Array:
    """Rows of q or k (H*D, …) from GGUF's order (neighbouring pairs) to that of halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # (H, D/2, 2, …)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def write_safetensors(
    model: SyntheticCheckpoint, folder: Path, scaling: Mapping[str, Any], *, reorder: bool = True
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
                values = halves(values, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{NAMES[part]}.{kind}"
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
        **scaling,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(source: Path, package: Path) -> Array:
    build_package(open_checkpoint(source), package, name="test")
    with Package.open(package) as opened:
        return Decoder(opened, unit="reference").advance(TOKENS, all_logits=True)


def compare(
    tmp_path: Path, arguments: Mapping[str, Any], rope: str, *, reorder: bool = True
) -> tuple[Array, Array]:
    """Logits (T, V) from the GGUF file and from safetensors."""
    for_gguf, for_config = ROPES[rope]
    model = SyntheticCheckpoint(9, context=CONTEXT, **{**arguments, **for_gguf})
    write_gguf(model, tmp_path / "model.gguf")
    folder = write_safetensors(model, tmp_path / "model", for_config, reorder=reorder)
    return (
        logits(tmp_path / "model.gguf", tmp_path / "gguf.package"),
        logits(folder, tmp_path / "safetensors.package"),
    )


@pytest.mark.parametrize("heads", list(HEADS))
@pytest.mark.parametrize("family", FAMILIES)
def test_head_configuration_gives_the_same_logits_from_both_formats(
    family: str, heads: str, tmp_path: Path
) -> None:
    from_gguf, from_safetensors = compare(tmp_path, {"family": family, **HEADS[heads]}, "none")
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


def test_biases_give_the_same_logits_from_both_formats(tmp_path: Path) -> None:
    arguments = {"heads": 4, "kv_heads": 2, "biases": True}
    from_gguf, from_safetensors = compare(tmp_path, arguments, "none")
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_scaled_rope_of_other_families_is_the_same_from_both_formats(
    rope: str, family: str, tmp_path: Path
) -> None:
    arguments = {"family": family, "heads": 4, "kv_heads": 2, "head_dim": 16}
    from_gguf, from_safetensors = compare(tmp_path, arguments, rope)
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_rope_variant_gives_the_same_logits_from_both_formats(
    kv_heads: int, rope: str, tmp_path: Path
) -> None:
    arguments = {"heads": 4, "kv_heads": kv_heads, "head_dim": 16}
    from_gguf, from_safetensors = compare(tmp_path, arguments, rope)
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


def test_rope_variants_differ_from_each_other(tmp_path: Path) -> None:
    """Otherwise the comparison of the variants would show nothing."""
    found = []
    for rope in ROPES:
        (tmp_path / rope).mkdir()
        found.append(compare(tmp_path / rope, {"heads": 4, "kv_heads": 2}, rope)[1])
    for first in range(len(found)):
        for second in range(first):
            assert np.abs(found[first] - found[second]).max() > 0.1


def test_rows_left_in_gguf_order_would_be_noticed(tmp_path: Path) -> None:
    arguments = HEADS["32 heads and 4 key/value heads"]
    from_gguf, wrong = compare(tmp_path, arguments, "none", reorder=False)
    assert np.abs(from_gguf - wrong).max() > 0.1
