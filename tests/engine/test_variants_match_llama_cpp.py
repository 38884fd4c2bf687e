"""Tiny models that differ in heads, biases, RoPE and family, against logits of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint
from engine.native.library import NativeUnavailable
from engine.options import EngineOptions
from engine.package import Package, build_package

GOLDEN = Path(__file__).parent.parent / "golden"
RECORDS: dict[str, dict[str, Any]] = {
    name: json.loads((GOLDEN / f"llama_cpp_{name}.json").read_text("utf-8"))
    for name in ("variants", "families")
}
# Two float32 engines differ by 2e-5 at most here, on logits with a standard deviation of 3 to 9.
TOLERANCE = 1e-4


WAYS = {
    "packed": EngineOptions(),
    "reference": EngineOptions(unit="reference"),
    "native": EngineOptions(unit="native"),
    "native, fused": EngineOptions(unit="native", executor="compiled", fused=True, threads=2),
}
VARIANTS = [(name, variant) for name, record in RECORDS.items() for variant in record["variants"]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_logits_of_a_tiny_model_are_those_of_llama_cpp(
    name: str, variant: str, way: str, tmp_path: Path
) -> None:
    if way.startswith("native") and RECORDS[name]["variants"][variant]["head_dim"] % 16:
        return  # refused by name: see the tests of the native library
    with np.load(GOLDEN / f"llama_cpp_{name}.npz", allow_pickle=False) as file:
        tokens, theirs = file["tokens"], file[f"logits/{variant}"]
    record = RECORDS[name]
    model = SyntheticCheckpoint(record["seed"], **record["variants"][variant])
    path = tmp_path / "tiny.package"
    build_package(model, path, name=variant)
    with Package.open(path) as package:
        try:
            decoder = Decoder(package, options=WAYS[way])
        except NativeUnavailable as error:
            pytest.skip(f"needs a C compiler: {error}")
        ours = decoder.advance(tokens, all_logits=True)[-len(theirs) :]
    assert theirs.std() > 1  # the comparison means something only where logits differ
    assert np.abs(ours - theirs).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("variants", "32 heads, 4 kv heads"),
        ("families", "qwen2, 32 heads, 4 kv heads"),
        ("families", "qwen3, 32 heads, 4 kv heads"),
    ],
)
def test_decode_steps_give_the_logits_that_prefill_gives_to_llama_cpp(
    name: str, variant: str, tmp_path: Path
) -> None:
    with np.load(GOLDEN / f"llama_cpp_{name}.npz", allow_pickle=False) as file:
        tokens, theirs = file["tokens"], file[f"logits/{variant}"]
    record = RECORDS[name]
    path = tmp_path / "tiny.package"
    model = SyntheticCheckpoint(record["seed"], **record["variants"][variant])
    build_package(model, path, name="tiny")
    with Package.open(path) as package:
        decoder = Decoder(package)
        ours = [decoder.advance(tokens[step : step + 1]) for step in range(len(tokens))]
    assert np.abs(np.array(ours[-len(theirs) :]) - theirs).max() < TOLERANCE
