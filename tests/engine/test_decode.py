"""The decoder and generation: cache, limits, taps, traces, several turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.decode import ContextFull, Decoder, generate
from engine.package import Package
from engine.runtime.trace import Taps, Trace
from engine.sampling import Sampling

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture
def package(synthetic_package: Path) -> Package:
    return Package.open(synthetic_package)


def test_prefill_in_pieces_and_decode_steps_give_the_same_logits(package: Package) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 200)  # more than one piece of prefill
    whole = Decoder(package).advance(tokens, all_logits=True)
    steps = Decoder(package)
    one_by_one = np.stack([steps.advance(tokens[i : i + 1]) for i in range(len(tokens))])
    assert whole.shape == (200, 256)
    assert np.allclose(whole, one_by_one, atol=1e-4)
    assert np.allclose(Decoder(package).advance(tokens), whole[-1], atol=1e-4)


def test_a_truncated_cache_continues_as_if_the_rest_never_was(package: Package) -> None:
    decoder = Decoder(package)
    decoder.advance(np.array(PROMPT))
    expected = decoder.advance(np.array([7]))
    decoder.truncate(len(PROMPT))
    decoder.advance(np.array([200, 201, 202]))
    decoder.truncate(len(PROMPT))
    assert np.array_equal(decoder.advance(np.array([7])), expected)
    with pytest.raises(ValueError, match="cannot truncate to 99"):
        decoder.truncate(99)


def test_a_decoder_can_go_back_up_to_slots_that_were_written_again(package: Package) -> None:
    tokens = np.arange(10, 40)
    decoder = Decoder(package)
    decoder.advance(tokens)
    expected = decoder.advance(np.array([7]))
    decoder.seek(5)
    for token in tokens[5:9]:
        decoder.advance(np.array([token]))
    decoder.seek(len(tokens))
    assert np.allclose(decoder.advance(np.array([7])), expected, atol=1e-4)
    with pytest.raises(ValueError, match="cannot seek to 257"):
        decoder.seek(257)


def test_taps_and_trace_leave_every_bit_as_it_was(package: Package) -> None:
    plain = Decoder(package).advance(np.array(PROMPT), all_logits=True)
    trace = Trace()
    watched = Decoder(package, trace=trace)
    assert np.array_equal(watched.advance(np.array(PROMPT), taps=Taps(), all_logits=True), plain)
    rows = trace.rows()
    assert rows[:, 1].tolist() == list(range(len(watched.program.ops)))
    assert (rows[:, 3] >= rows[:, 2]).all() and (rows[1:, 2] >= rows[:-1, 3]).all()


def test_a_full_trace_ring_keeps_the_newest_ops(package: Package) -> None:
    trace = Trace(capacity=10)
    decoder = Decoder(package, trace=trace)
    decoder.advance(np.array([1]))
    assert trace.rows()[:, 1].tolist() == list(range(len(decoder.program.ops)))[-10:]


def test_tokens_that_do_not_fit_are_refused_before_anything_is_written(package: Package) -> None:
    decoder = Decoder(package, context=8)
    before = decoder.advance(np.array(PROMPT))
    with pytest.raises(ContextFull, match="3 still fit"):
        decoder.advance(np.array([1, 2, 3, 4]))
    assert decoder.position == len(PROMPT)
    decoder.truncate(len(PROMPT) - 1)
    assert np.allclose(decoder.advance(np.array(PROMPT[-1:])), before, atol=1e-4)


def test_a_token_outside_the_vocabulary_is_named(package: Package) -> None:
    with pytest.raises(ValueError, match="token 256 is outside the vocabulary of 256"):
        Decoder(package).advance(np.array([1, 256]))


def test_generation_ends_at_the_context_with_finish_length(package: Package) -> None:
    run = generate(Decoder(package, context=20), PROMPT, max_new=400)
    tokens = [event.token for event in run]
    assert run.result.finish == "length"
    assert len(tokens) == 20 - len(PROMPT) + 1  # the last token needs no slot
    with pytest.raises(ContextFull):
        generate(Decoder(package, context=4), PROMPT, max_new=1)


def test_generation_stops_on_any_end_token(package: Package) -> None:
    free = [event.token for event in generate(Decoder(package), PROMPT, max_new=10)]
    run = generate(Decoder(package), PROMPT, max_new=10, stop_ids=(free[4], 999))
    cut = [event.token for event in run]
    assert cut == free[: free.index(free[4]) + 1] and run.result.finish == "stop"


def test_a_cancelled_generation_says_so_and_leaves_a_usable_decoder(package: Package) -> None:
    decoder, seen = Decoder(package), []
    run = generate(decoder, PROMPT, max_new=50, cancel=lambda: len(seen) >= 3)
    for event in run:
        seen.append(event.token)
    assert run.result.finish == "cancelled" and len(run.result.tokens) == 3
    decoder.reset()
    again = [event.token for event in generate(decoder, PROMPT, max_new=3)]
    assert again == seen


def test_a_second_turn_continues_as_one_long_prompt_would(package: Package) -> None:
    decoder = Decoder(package)
    first = [event.token for event in generate(decoder, PROMPT, max_new=6)]
    turn = [first[-1], 10, 11, 12]
    second = [event.token for event in generate(decoder, turn, max_new=6)]
    whole = PROMPT + first + [10, 11, 12]
    assert second == [event.token for event in generate(Decoder(package), whole, max_new=6)]


def test_a_result_counts_times_as_defined(package: Package) -> None:
    run = generate(Decoder(package), PROMPT, max_new=5)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = run.result
    events = list(run)
    result = run.result
    assert result.t_ns == tuple(event.t_ns for event in events)
    end_to_end = (result.t_ns[-1] - result.started_ns) / 1e9
    assert result.ttft_s is not None and result.tpot_s is not None
    assert result.tpot_s == pytest.approx((end_to_end - result.ttft_s) / 4)


def test_an_empty_prompt_is_refused(package: Package) -> None:
    with pytest.raises(ValueError, match="prompt has no tokens"):
        generate(Decoder(package), [], max_new=1)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(package: Package) -> None:
    def text(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        return [e.token for e in generate(Decoder(package), PROMPT, sampling=sampling, max_new=20)]

    assert text(42) == text(42) != text(43)


def test_memory_does_not_hold_the_weights_twice(package: Package) -> None:
    """The arrays that a decoder owns beside the mapping stay far below the weights."""
    decoder = Decoder(package, context=16)
    decoder.advance(np.array(PROMPT))
    unit = decoder.unit
    owned = [a for a in vars(unit).values() if isinstance(a, np.ndarray) and a.flags.owndata]
    vectors = list(unit._vectors.values())  # type: ignore[attr-defined]  # packed's own
    assert all(len(vector.shape) == 1 for vector in vectors)
    assert sum(a.nbytes for a in owned) <= 1 << 20
