"""The same weights as a GGUF file and as safetensors give the same logits.

The two differ in what they hold: GGUF keeps the rows of q and k in the order of neighbouring RoPE
pairs, safetensors in that of halves, and each names tensors and RoPE scaling in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint, open_checkpoint
from engine.formats.gguf_writer import write_gguf
from engine.package import Package, build_package

Array = npt.NDArray[np.float32]
CONTEXT = 128
ORIGINAL = 32  # the context before scaling; tokens reach beyond it
TOKENS = np.array([(5 + 29 * index + index * index) % 253 for index in range(64)], np.int64)
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


def logits(source: Path, package: Path) -> Array:
    build_package(open_checkpoint(source), package, name="test")
    with Package.open(package) as opened:
        return Decoder(opened, unit="reference").advance(TOKENS, all_logits=True)


Compare = Callable[..., tuple[Array, Array]]


@pytest.fixture
def compare(tmp_path: Path, write_safetensors: Callable[..., Path]) -> Compare:
    """Logits (T, V) of a model from a GGUF file and from safetensors."""

    def compared(
        arguments: Mapping[str, Any], rope: str, *, reorder: bool = True
    ) -> tuple[Array, Array]:
        for_gguf, for_config = ROPES[rope]
        place = tmp_path / rope
        place.mkdir()
        model = SyntheticCheckpoint(9, context=CONTEXT, **{**arguments, **for_gguf})
        write_gguf(model, place / "model.gguf")
        folder = write_safetensors(model, place / "model", for_config, reorder=reorder)
        return (
            logits(place / "model.gguf", place / "gguf.package"),
            logits(folder, place / "safetensors.package"),
        )

    return compared


@pytest.mark.parametrize("heads", list(HEADS))
@pytest.mark.parametrize("family", FAMILIES)
def test_head_configuration_gives_the_same_logits_from_both_formats(
    family: str, heads: str, compare: Compare
) -> None:
    from_gguf, from_safetensors = compare({"family": family, **HEADS[heads]}, "none")
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


def test_biases_give_the_same_logits_from_both_formats(compare: Compare) -> None:
    arguments = {"heads": 4, "kv_heads": 2, "biases": True}
    from_gguf, from_safetensors = compare(arguments, "none")
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_scaled_rope_of_other_families_is_the_same_from_both_formats(
    rope: str, family: str, compare: Compare
) -> None:
    arguments = {"family": family, "heads": 4, "kv_heads": 2, "head_dim": 16}
    from_gguf, from_safetensors = compare(arguments, rope)
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_rope_variant_gives_the_same_logits_from_both_formats(
    kv_heads: int, rope: str, compare: Compare
) -> None:
    arguments = {"heads": 4, "kv_heads": kv_heads, "head_dim": 16}
    from_gguf, from_safetensors = compare(arguments, rope)
    np.testing.assert_allclose(from_gguf, from_safetensors, atol=2e-5)


def test_rope_variants_differ_from_each_other(compare: Compare) -> None:
    """Otherwise the comparison of the variants would show nothing."""
    found = []
    for rope in ROPES:
        found.append(compare({"heads": 4, "kv_heads": 2}, rope)[1])
    for first in range(len(found)):
        for second in range(first):
            assert np.abs(found[first] - found[second]).max() > 0.1


def test_rows_left_in_gguf_order_would_be_noticed(compare: Compare) -> None:
    arguments = HEADS["32 heads and 4 key/value heads"]
    from_gguf, wrong = compare(arguments, "none", reorder=False)
    assert np.abs(from_gguf - wrong).max() > 0.1
