"""A full context that goes on as a ring behind a kept prefix."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architectures import family_named
from engine.decode import ContextFull, Decoder, generate
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import Package, build_package
from engine.program.passes import apply
from engine.runtime.ring import Places, require_relative, with_ring
from engine.runtime.sync import SyncExecutor
from engine.units.reference import Reference

TOKENS = np.random.default_rng(11).integers(0, 256, 60)
ROPES: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope": {"scaling.type": "linear", "scaling.factor": 4.0}},
    "llama3": {"rope_divisors": [1, 1, 1.5, 2, 4, 8, 8, 8]},
    "yarn": {
        "rope": {
            "scaling.type": "yarn",
            "scaling.factor": 4.0,
            "scaling.original_context_length": 64,
        }
    },
}


@pytest.fixture(scope="module", params=ROPES)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("ring") / "model.pkg"
    build_package(SyntheticCheckpoint(seed=7, **ROPES[request.param]), path, name="ring")
    opened = Package.open(path)
    assert opened.hyperparameters.rope == request.param
    return opened


class Rebuilding(Reference):
    """Keeps un-rotated keys of what is left of a text, and rotates all of them anew for positions
    0 … S − 1 at each step: what a ring has to equal."""

    def __init__(self, package: Package, context: int, keep: int) -> None:
        super().__init__(package, context, np.float64)
        self.keep = keep
        self.left: dict[str, list[tuple[Any, Any]]] = {}

    def _rope(self, op: Any, state: Any) -> None:
        for source, target in zip(op.reads[:2], op.writes, strict=False):
            state[target] = state[source]
        self.rope = op

    def _kv_append(self, op: Any, state: Any) -> None:
        rows = self.left.setdefault(op.writes[0], [])
        if len(rows) == self.context:
            del rows[self.keep]
        rows.append((state[op.reads[0]][0], state[op.reads[1]][0]))

    def _attention(self, op: Any, state: Any) -> None:
        hp, rows = self.hp, self.left[op.reads[1]]
        count = len(rows)
        keys, values = (np.stack([row[part] for row in rows]) for part in (0, 1))
        keys = self._rotated(self.rope, keys, np.arange(count)).reshape(count, hp.kv_heads, -1)
        values = values.reshape(count, hp.kv_heads, -1)
        q = self._rotated(self.rope, state[op.reads[0]], np.array([count - 1]))
        out = []
        for head, q_D in enumerate(q.reshape(hp.heads, hp.head_dim)):
            group = head * hp.kv_heads // hp.heads
            weights = np.exp(keys[:, group] @ q_D / np.sqrt(hp.head_dim))
            out.append(weights / weights.sum() @ values[:, group])
        state[op.writes[0]] = np.concatenate(out)[None]


@pytest.mark.parametrize("keep", [0, 1, 4, 11])
def test_a_ring_equals_attention_over_what_is_left_at_positions_from_0(
    package: Package, keep: int
) -> None:
    context = 12
    ring = Decoder(package, unit="reference", context=context, keep=keep, dtype=np.float64)
    rebuilt = Decoder(package, unit="reference", context=256, dtype=np.float64)
    rebuilt.executor.unit = Rebuilding(package, context, keep)
    for position, token in enumerate(TOKENS):
        found, wanted = ring.advance(np.array([token])), rebuilt.advance(np.array([token]))
        assert np.allclose(found, wanted, rtol=0, atol=1e-9), position
    assert ring.position == len(TOKENS)


def test_the_prefix_and_its_rotation_both_matter(package: Package) -> None:
    """Guards the test above: it would tell a prefix read with the window's queries."""
    last = []
    for keep in (0, 4):
        decoder = Decoder(package, unit="reference", context=12, keep=keep, dtype=np.float64)
        last.append(decoder.advance(TOKENS))
    wrong = Decoder(package, unit="reference", context=12, keep=4, dtype=np.float64)
    inputs = type(wrong.places).inputs

    class Unrotated(Places):
        def inputs(self, positions: Any, start: Any = 0) -> Any:
            return {**inputs(self, positions, start), "prefix_positions": positions}

    wrong.places = Unrotated(12, 4)
    last.append(wrong.advance(TOKENS))
    assert not np.allclose(last[0], last[1], atol=1e-3)
    assert not np.allclose(last[1], last[2], atol=1e-3)


@pytest.mark.parametrize("unit", ["reference", "packed"])
def test_a_ring_changes_nothing_before_it_is_full(package: Package, unit: str) -> None:
    plain = Decoder(package, unit=unit, context=30).advance(TOKENS[:30])
    assert np.array_equal(
        plain, Decoder(package, unit=unit, context=30, keep=3).advance(TOKENS[:30])
    )


@pytest.mark.parametrize("fused", [False, True])
def test_packed_follows_the_reference_beyond_the_end_in_prefill_and_decode(
    package: Package, fused: bool
) -> None:
    exact = Decoder(package, unit="reference", context=16, keep=3, dtype=np.float64)
    packed = Decoder(package, context=16, keep=3)
    if fused:
        packed.executor = SyncExecutor(apply(packed.program), packed.unit)
    wanted = exact.advance(TOKENS, all_logits=True)
    found = packed.advance(TOKENS, all_logits=True)
    assert np.allclose(found, wanted, atol=2e-4)


def test_steps_do_not_cross_the_wrap() -> None:
    places = Places(10, keep=2)
    assert list(places.pieces(3, 10, 4)) == [(0, 4), (4, 7), (7, 8), (8, 9), (9, 10)]
    assert list(Places(10).pieces(0, 10, 4)) == [(0, 4), (4, 8), (8, 10)]


@given(st.integers(1, 40), st.data())
@settings(max_examples=100)
def test_every_slot_holds_the_position_that_it_should(context: int, data: st.DataObject) -> None:
    """Simulated with a list: the oldest token behind the prefix makes room."""
    keep = data.draw(st.integers(0, context - 1))
    total = data.draw(st.integers(1, 3 * context))
    start = data.draw(st.integers(0, 1000))
    found = Places(context, keep).inputs(np.arange(total), start)
    held: dict[int, int] = {}
    left: list[int] = []
    for position in range(total):
        held[int(found["slots"][position]) - start] = position
        if len(left) == context:
            del left[keep]
        left.append(position)
        assert sorted(held.values()) == left
        assert found["visible"][position] == len(left)
        assert found["starts"][position] == start
        if keep:  # the prefix seems as far away as if what is left stood side by side
            assert found["prefix_positions"][position] == len(left) - 1


def test_a_ring_never_ends_a_generation_and_a_plain_context_does(package: Package) -> None:
    plain = generate(Decoder(package, context=16), [1, 2, 3], max_new=40)
    assert len(list(plain)) == 14 and plain.result.finish == "length"
    ring = generate(Decoder(package, context=16, keep=2), [1, 2, 3], max_new=40)
    assert len(list(ring)) == 40 and ring.result.finish == "length"
    long_prompt = generate(Decoder(package, context=16, keep=2), [5] * 30, max_new=2)
    assert len(list(long_prompt)) == 2
    with pytest.raises(ContextFull, match="30 tokens at position 0 exceed the context of 16"):
        generate(Decoder(package, context=16), [5] * 30, max_new=2)


def test_what_a_ring_overwrote_cannot_be_truncated_to(package: Package) -> None:
    decoder = Decoder(package, context=16, keep=2)
    decoder.advance(TOKENS[:10])
    decoder.truncate(5)
    decoder.advance(TOKENS[:20])
    with pytest.raises(ValueError, match="overwritten 9 positions; reset the decoder"):
        decoder.truncate(12)
    decoder.truncate(25)
    decoder.reset()
    assert np.allclose(decoder.advance(TOKENS[:5]), Decoder(package).advance(TOKENS[:5]), atol=1e-5)


@pytest.mark.parametrize("keep", [-1, 16, 17])
def test_a_prefix_that_leaves_no_slot_is_refused(package: Package, keep: int) -> None:
    with pytest.raises(ValueError, match=rf"keep is {keep}, expected (0 to 15|a whole number)"):
        Decoder(package, context=16, keep=keep)


def test_rope_whose_angles_depend_on_the_position_is_refused_by_name(package: Package) -> None:
    hp = dataclasses.replace(package.hyperparameters, rope="dynamic")
    with pytest.raises(ValueError, match=r"RoPE 'dynamic'.*run without keep"):
        require_relative(hp)


def test_a_fused_program_takes_no_ring(package: Package) -> None:
    program = family_named("llama").program(package.hyperparameters)
    with pytest.raises(ValueError, match="fused already; make the ring before fusing"):
        with_ring(apply(program), 2)


def test_the_prefix_of_a_long_text_is_never_rewritten(package: Package) -> None:
    decoder = Decoder(package, context=16, keep=3)
    decoder.advance(TOKENS[:16])
    before = decoder.cache.buffers()["L01.k"].copy()
    decoder.advance(TOKENS[16:18])
    changed = (decoder.cache.buffers()["L01.k"] != before).any(axis=(1, 2))
    assert np.flatnonzero(changed).tolist() == [3, 4]


def test_a_ring_goes_beyond_the_context_that_the_model_was_made_for(tmp_path: Path) -> None:
    path = tmp_path / "m.pkg"
    build_package(SyntheticCheckpoint(seed=1, context=64), path, name="m")
    decoder = Decoder(Package.open(path), keep=1)
    decoder.advance(np.tile(TOKENS, 3))
    assert decoder.position == 180 and decoder.context == 64 and not decoder.full
