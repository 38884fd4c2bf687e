"""Batched decode: each sequence as if it were alone, whatever its neighbours do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batching import BatchDecoder, Request, generate_batch
from engine.decode import ContextFull, Decoder, GenerationResult, NonFinite, generate
from engine.package import Package
from engine.program.ops import Op
from engine.program.passes import apply
from engine.runtime.async_ import AsyncExecutor
from engine.runtime.cache import KVCache, length_buckets
from engine.runtime.state import State
from engine.sampling import Sampling
from engine.units import load_unit

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, 256, length).tolist() for length in (40, 3, 17, 1, 38, 5, 60)]


@pytest.fixture(scope="module")
def package(synthetic_package: Path) -> Iterator[Package]:
    with Package.open(synthetic_package) as opened:
        yield opened


def alone(package: Package, prompt: list[int], unit: str, **arguments: Any) -> GenerationResult:
    generation = generate(Decoder(package, unit=unit), prompt, **arguments)
    list(generation)
    return generation.result


def finished(results: list[GenerationResult | Exception]) -> list[GenerationResult]:
    assert not [result for result in results if isinstance(result, Exception)]
    return [result for result in results if isinstance(result, GenerationResult)]


@pytest.mark.parametrize("buckets", [0, 1, 1.25, 4])
@pytest.mark.parametrize("unit", ["reference", "packed"])
def test_a_batch_writes_what_each_sequence_writes_alone(
    package: Package, unit: str, buckets: float
) -> None:
    """More requests than regions, so regions are used again while neighbours go on."""
    batch = BatchDecoder(package, sequences=3, buckets=buckets, unit=unit)
    requests = [Request(p, max_new=8 + 5 * (i % 3)) for i, p in enumerate(PROMPTS)]
    found = finished(generate_batch(batch, requests))
    for prompt, request, result in zip(PROMPTS, requests, found, strict=True):
        wanted = alone(package, prompt, unit, **request.arguments)
        assert (result.tokens, result.finish) == (wanted.tokens, wanted.finish)
        assert result.prompt_tokens == len(prompt)
    assert batch.free == 3


def test_sampling_is_each_sequences_own(package: Package) -> None:
    samplings = [
        Sampling(temperature=1.2, seed=4),
        Sampling(),
        Sampling(temperature=0.8, top_k=20, seed=9, repetition_penalty=1.3),
    ]
    requests = [
        Request(prompt, max_new=12, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, samplings, strict=False)
    ]
    found = finished(generate_batch(BatchDecoder(package, sequences=3), requests))
    for request, result in zip(requests, found, strict=True):
        wanted = alone(package, list(request.prompt), "packed", **request.arguments)
        assert result.tokens == wanted.tokens


def test_sequences_stop_one_by_one_and_make_room(package: Package) -> None:
    batch = BatchDecoder(package, sequences=3, context=64)
    told = [False]
    long = batch.add(PROMPTS[4], max_new=100)
    stopped = batch.add(PROMPTS[1], max_new=100, stop_ids=range(256))
    cancelled = batch.add(PROMPTS[2], max_new=100, cancel=lambda: told[0])
    with pytest.raises(RuntimeError, match="all 3 sequences of the batch are live"):
        batch.add([1], max_new=1)
    assert [sequence for sequence, _ in batch.step()] == [stopped, cancelled, long]
    assert (stopped.finish, len(stopped.tokens)) == ("stop", 1) and batch.free == 1
    short = batch.add([1, 2], max_new=2)
    batch.step()
    told[0] = True
    assert {sequence.region for sequence, _ in batch.step()} == {long.region, short.region}
    assert (cancelled.finish, len(cancelled.tokens)) == ("cancelled", 2)
    assert (short.finish, len(short.tokens)) == ("length", 2)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = long.result
    while batch.live:
        batch.step()
    assert long.finish == "length" and len(PROMPTS[4]) + len(long.tokens) == 64 + 1
    assert batch.step() == []


@pytest.mark.parametrize("unit", ["reference", "packed"])
def test_a_ring_turns_for_each_sequence_by_itself(package: Package, unit: str) -> None:
    batch = BatchDecoder(package, sequences=3, context=20, keep=4, unit=unit)
    requests = [Request(prompt, max_new=30) for prompt in PROMPTS[:4]]
    found = finished(generate_batch(batch, requests))
    for prompt, result in zip(PROMPTS, found, strict=False):
        generation = generate(Decoder(package, context=20, keep=4, unit=unit), prompt, max_new=30)
        assert result.tokens == tuple(event.token for event in generation)


def test_only_the_request_that_cannot_be_run_fails(package: Package) -> None:
    batch = BatchDecoder(package, sequences=2, context=32)
    hi = [104, 105]
    found = generate_batch(
        batch,
        [Request([], max_new=4), Request(hi, max_new=4), Request([1, 999], max_new=4),
         Request([1] * 33, max_new=4), Request(hi, max_new=0)],
    )  # fmt: skip
    assert isinstance(found[1], GenerationResult)
    assert found[1].tokens == alone(package, hi, "packed", max_new=4).tokens
    assert "no tokens; give at least the BOS token" in str(found[0])
    assert "token 999 is outside the vocabulary of 256" in str(found[2])
    assert isinstance(found[3], ContextFull)
    assert "max_new is 0" in str(found[4])
    with pytest.raises(ValueError, match="batch of 0 sequences"):
        BatchDecoder(package, sequences=0)


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_bad_numbers_end_the_sequence_that_has_them(
    package: Package, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    from engine.units.packed import Packed

    original = Packed._embed

    def poisoned(self: Any, op: Op, state: State) -> None:
        original(self, op, state)
        state[op.writes[0]][state["tokens"] == 200] = np.nan

    monkeypatch.setattr(Packed, "_embed", poisoned)
    bad = [200, 7] if at == "prefill" else [7, 200]
    batch = BatchDecoder(package, sequences=3)
    found = generate_batch(batch, [Request(p, max_new=6) for p in (PROMPTS[1], bad, PROMPTS[2])])
    assert isinstance(found[1], NonFinite) and found[1].op == "embed.tokens"
    monkeypatch.setattr(Packed, "_embed", original)
    for index, prompt in ((0, PROMPTS[1]), (2, PROMPTS[2])):
        result = found[index]
        assert isinstance(result, GenerationResult)
        if 200 not in result.tokens[:-1]:
            assert result.tokens == alone(package, prompt, "packed", max_new=6).tokens


def test_a_batch_runs_fused_and_on_queues_too(package: Package) -> None:
    requests = [Request(prompt, max_new=15) for prompt in PROMPTS[:4]]
    plain = BatchDecoder(package, sequences=3, context=40, keep=2)
    queued = BatchDecoder(package, sequences=3, context=40, keep=2)
    fused = apply(queued.decoder.program)
    queued.decoder.executor = AsyncExecutor(fused, queued.decoder.unit)
    wanted = finished(generate_batch(plain, requests))
    assert [r.tokens for r in finished(generate_batch(queued, requests))] == [
        r.tokens for r in wanted
    ]
    queued.close()
    with pytest.raises(RuntimeError, match="closed"):
        queued.add([1, 2], max_new=1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.sampled_from([0, 1, 1.25, 3]))
@settings(max_examples=60)
def test_attention_of_a_sequence_does_not_see_its_neighbours(
    lengths: list[int], spread: float
) -> None:
    """In the reference to the bit; in the packed unit, which pads, to a rounding error."""
    package = ATTENTION["package"]
    hp = package.hyperparameters
    rng = np.random.default_rng(len(lengths))
    cache = KVCache(1, 50, hp.kv_heads, hp.head_dim, layout="numpy", sequences=len(lengths))
    caches = cache.buffers()
    for view in caches.values():
        view[:] = rng.standard_normal(view.shape)  # beyond a sequence's length: what others left
    names = ("q", "L00.k", "L00.v", "starts", "visible")
    op = Op("mix", "attention", names, ("mix",), (), {"buckets": spread})
    state: State = {
        "q": rng.standard_normal((len(lengths), hp.heads * hp.head_dim)).astype(np.float32),
        "starts": np.arange(len(lengths)) * 50,
        "visible": np.array(lengths),
        **caches,
    }
    for name in ("reference", "packed"):
        unit = load_unit(name, package)
        together = dict(state)
        unit.execute(op, together)
        for row in range(len(lengths)):
            single = {**state, **{k: state[k][row : row + 1] for k in ("q", "starts", "visible")}}
            unit.execute(op, single)
            if name == "reference":
                assert np.array_equal(together["mix"][row], single["mix"][0])
            else:
                assert np.allclose(together["mix"][row], single["mix"][0], atol=1e-6)


ATTENTION: dict[str, Package] = {}


@pytest.fixture(scope="module", autouse=True)
def _for_attention(package: Package) -> Iterator[None]:
    ATTENTION["package"] = package
    yield
    ATTENTION.clear()


@given(st.lists(st.integers(1, 5000), max_size=20), st.sampled_from([0, 1, 1.1, 1.25, 2]))
def test_buckets_hold_every_row_once_and_lengths_that_are_alike(
    lengths: list[int], spread: float
) -> None:
    visible = np.array(lengths, np.int64)
    buckets = length_buckets(visible, spread)
    rows = np.concatenate(buckets).tolist()
    assert sorted(rows) == list(range(len(lengths)))
    assert visible[rows].tolist() == sorted(lengths)
    if spread:
        for bucket in buckets:
            if len(bucket):
                assert visible[bucket].max() <= spread * visible[bucket].min()
    else:
        assert len(buckets) == 1


def test_buckets_that_are_no_ratio_are_refused(package: Package) -> None:
    with pytest.raises(ValueError, match="buckets are -1, expected a ratio from 1 on, or 0"):
        BatchDecoder(package, sequences=2, buckets=-1)
