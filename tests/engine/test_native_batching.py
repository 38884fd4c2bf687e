"""Batches and rings on the compiled native unit: each sequence as if it were alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batching import BatchDecoder, Request, generate_batch
from engine.decode import Decoder, GenerationResult, NonFinite, generate
from engine.formats import SyntheticCheckpoint
from engine.native.library import NativeUnavailable, load
from engine.options import EngineOptions
from engine.package import Package, build_package

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, 250, length).tolist() for length in (40, 3, 17, 1, 5, 60)]
NATIVE = dataclasses.replace(EngineOptions.for_unit("native"), threads=3)
WAYS: dict[str, dict[str, Any]] = {
    "as the unit runs best": {},
    "unfused, op by op": {"fused": False, "executor": "sync"},
    "plain arrays": {"kv": "f32", "kv_layout": "numpy"},
    "int8 cache by rows": {"kv": "int8", "kv_layout": "sd"},
    "int4 cache by panels": {"kv": "int4", "kv_layout": "ds"},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    path = tmp_path_factory.mktemp("batch") / "model.pkg"
    model = SyntheticCheckpoint(3, width=96, heads=6, kv_heads=3, head_dim=32, context=700)
    build_package(model, path, name="batch", layout="interleaved", scheme="w4")
    with Package.open(path) as opened:
        yield opened


def alone(package: Package, request: Request, options: EngineOptions, context: int) -> list[int]:
    decoder = Decoder(package, options=options, context=context)
    generation = generate(decoder, request.prompt, **request.arguments)
    return [event.token for event in generation]


def tokens_of(results: list[GenerationResult | Exception]) -> list[list[int]]:
    assert not [result for result in results if isinstance(result, Exception)]
    return [list(result.tokens) for result in results if isinstance(result, GenerationResult)]


@pytest.mark.parametrize("keep", [None, 0, 6])
@pytest.mark.parametrize("buckets", [0, 1.25])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_writes_what_each_sequence_writes_alone(
    package: Package, way: str, buckets: float, keep: int | None
) -> None:
    """To the bit, with integer activations: what is likeliest never flips. Regions are used again
    while neighbours go on, and rings turn each by itself."""
    options = dataclasses.replace(NATIVE, **WAYS[way], keep=keep)
    context = 70 if keep is None else 33
    requests = [Request(p, max_new=8 + 5 * (i % 3)) for i, p in enumerate(PROMPTS)]
    batch = BatchDecoder(
        package, sequences=3, context=context, buckets=buckets, options=options
    )  # fmt: skip
    found = tokens_of(generate_batch(batch, requests))
    assert found == [alone(package, request, options, context) for request in requests]


@pytest.mark.parametrize("buckets", [0, 1.25])
def test_twenty_sequences_of_very_different_lengths(package: Package, buckets: float) -> None:
    """More rows than are split over slots; the longest has three chunks, most have one."""
    lengths = [1 + 7 * index for index in range(18)] + [400, 610]
    requests = [
        Request(RNG.integers(0, 250, length).tolist(), max_new=5) for length in lengths
    ]  # fmt: skip
    batch = BatchDecoder(package, sequences=20, context=640, buckets=buckets, options=NATIVE)
    found = tokens_of(generate_batch(batch, requests))
    assert found == [alone(package, request, NATIVE, 640) for request in requests]


def test_a_batch_may_be_larger_than_a_piece_of_prefill(package: Package) -> None:
    requests = [Request([index % 250, 7], max_new=3) for index in range(150)]
    batch = BatchDecoder(package, sequences=150, context=8, options=NATIVE)
    found = tokens_of(generate_batch(batch, requests))
    assert found == [alone(package, request, NATIVE, 8) for request in requests]


def test_a_batch_of_floats_agrees_with_the_reference(package: Package) -> None:
    native = EngineOptions(unit="native", executor="compiled", fused=True, keep=3, threads=2)
    reference = EngineOptions(unit="reference", keep=3)
    requests = [Request(prompt, max_new=30) for prompt in PROMPTS]
    batch = BatchDecoder(package, sequences=4, context=45, options=native)
    found = tokens_of(generate_batch(batch, requests))
    assert found == [alone(package, request, reference, 45) for request in requests]


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_bad_numbers_end_the_sequence_that_has_them(
    package: Package, at: str, tmp_path: Path
) -> None:
    poisoned, path = 200, tmp_path / "bad.pkg"
    path.write_bytes(package.path.read_bytes())
    d = package.tensors["embed"].parts["d"]  # (R, K/32, 16)
    index = int(np.ravel_multi_index((poisoned // 16, 1, poisoned % 16), d.shape))
    with path.open("r+b") as file:
        file.seek(package.offset_of(d) + index * d.itemsize)
        file.write(np.array([math.nan]).astype(d.dtype).tobytes())
    bad = Package.open(path)
    prompts = [PROMPTS[1], [poisoned, 7] if at == "prefill" else [7, poisoned], PROMPTS[2]]
    requests = [Request(prompt, max_new=6) for prompt in prompts]
    found = generate_batch(BatchDecoder(bad, sequences=3, context=70, options=NATIVE), requests)
    assert isinstance(found[1], NonFinite) and found[1].op == "embed.tokens"
    for index in (0, 2):
        wanted = alone(package, requests[index], NATIVE, 70)
        assert poisoned not in wanted[:-1]
        assert tokens_of([found[index]]) == [wanted]


@pytest.mark.parametrize("keep", [0, 1, 31, 40, 260])
@pytest.mark.parametrize("layout", ["numpy", "sd", "ds", "mixed"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_ring_is_that_of_the_reference_where_its_prefix_ends_inside_panels_and_chunks(
    package: Package, fused: bool, layout: str, keep: int
) -> None:
    native = EngineOptions(
        unit="native", executor="compiled", fused=fused, kv_layout=layout, keep=keep, threads=2
    )
    reference = EngineOptions(unit="reference", keep=keep)
    context = 300 if keep > 40 else 50
    tokens = np.random.default_rng(keep).integers(0, 250, context + 12)
    found, wanted = (
        Decoder(package, options=options, context=context).advance(tokens, all_logits=True)
        for options in (native, reference)
    )
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
