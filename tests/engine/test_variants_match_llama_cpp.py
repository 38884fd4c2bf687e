"""Tiny models that differ in heads, biases and RoPE, against llama.cpp's logits for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint
from engine.package import Package, build_package

GOLDEN = Path(__file__).parent.parent / "golden"
RECORD: dict[str, Any] = json.loads((GOLDEN / "llama_cpp_variants.json").read_text("utf-8"))
# Two float32 engines differ by 2e-5 at most here, on logits with a standard deviation of 3 to 9.
TOLERANCE = 1e-4


@pytest.mark.parametrize("unit", ["packed", "reference"])
@pytest.mark.parametrize("variant", list(RECORD["variants"]))
def test_logits_of_a_tiny_model_are_those_of_llama_cpp(
    variant: str, unit: str, tmp_path: Path
) -> None:
    with np.load(GOLDEN / "llama_cpp_variants.npz", allow_pickle=False) as file:
        tokens, theirs = file["tokens"], file[f"logits/{variant}"]
    model = SyntheticCheckpoint(RECORD["seed"], **RECORD["variants"][variant])
    path = tmp_path / "tiny.package"
    build_package(model, path, name=variant)
    with Package.open(path) as package:
        ours = Decoder(package, unit=unit).advance(tokens, all_logits=True)[-len(theirs) :]
    assert theirs.std() > 1  # the comparison means something only where logits differ
    assert np.abs(ours - theirs).max() < TOLERANCE


def test_decode_steps_give_the_logits_that_prefill_gives_to_llama_cpp(tmp_path: Path) -> None:
    with np.load(GOLDEN / "llama_cpp_variants.npz", allow_pickle=False) as file:
        tokens, theirs = file["tokens"], file["logits/32 heads, 4 kv heads"]
    arguments = RECORD["variants"]["32 heads, 4 kv heads"]
    path = tmp_path / "tiny.package"
    build_package(SyntheticCheckpoint(RECORD["seed"], **arguments), path, name="tiny")
    with Package.open(path) as package:
        decoder = Decoder(package)
        ours = [decoder.advance(tokens[step : step + 1]) for step in range(len(tokens))]
    assert np.abs(np.array(ours[-len(theirs) :]) - theirs).max() < TOLERANCE
