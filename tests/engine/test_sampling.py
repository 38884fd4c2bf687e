"""Sampling against brute force, and a random stream that depends on seed and index alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import Sampling, choose, uniform

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))


def share(sampling: dict[str, float], draws: int = 4000) -> dict[int, float]:
    options = Sampling(temperature=1.0, seed=1, **sampling)  # type: ignore[arg-type]
    counts = Counter(choose(LOGITS, options, index) for index in range(draws))
    return {token: count / draws for token, count in counts.items()}


def test_plain_sampling_follows_the_probabilities() -> None:
    found = share({})
    for token, probability in enumerate((0.5, 0.2, 0.15, 0.1, 0.05)):
        assert found[token] == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),  # the token that crosses the mass belongs to the set
        ({"top_p": 0.5}, {0}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.35}, {0, 1}),
    ],
)
def test_filters_keep_the_right_tokens(sampling: dict[str, float], kept: set[int]) -> None:
    assert set(share(sampling, 1500)) == kept


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert choose(np.array([1.0, 3.0, 3.0], np.float32), Sampling(), 0) == 1


def test_the_penalty_pushes_seen_tokens_down_whatever_their_sign() -> None:
    penalty = Sampling(repetition_penalty=2.0)
    assert choose(np.array([3.0, 2.0, -1.0], np.float32), penalty, 0, [0]) == 1
    assert choose(np.array([-1.0, -1.5, -9.0], np.float32), penalty, 0, [0]) == 1


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**40))
def test_a_draw_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    value = uniform(seed, index)
    assert 0.0 <= value < 1.0
    uniform(seed, index + 1)
    assert uniform(seed, index) == value


def test_the_stream_is_the_same_on_every_machine() -> None:
    found = [round(uniform(42, index), 12) for index in range(3)]
    assert found == STREAM_OF_42


STREAM_OF_42 = [0.820198147861, 0.862381203832, 0.277324826973]


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.99),
    index=st.integers(0, 1000),
)
def test_any_options_choose_a_token_of_the_vocabulary(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, index: int
) -> None:
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert 0 <= choose(np.array(logits, np.float32), options, index) < len(logits)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"min_p": 1}, {"top_k": -1}, {"seed": -1}]
)
def test_options_out_of_range_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]


def drawn_from_all(logits: np.ndarray, sampling: Sampling, index: int) -> int:
    """The definition: sort the whole vocabulary, filter, draw."""
    scores = logits.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    order = order[: sampling.top_k] if sampling.top_k else order
    p = np.exp((scores[order] - scores[order[0]]) / sampling.temperature)
    p /= p.sum()
    if sampling.top_p < 1:
        p = p[np.cumsum(p) - p < sampling.top_p]
    if sampling.min_p:
        p = p[p >= sampling.min_p * p[0]]
    cumulative = np.cumsum(p)
    draw = uniform(sampling.seed, index) * cumulative[-1]
    return int(order[min(np.searchsorted(cumulative, draw, side="right"), len(p) - 1)])


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])  # flat: the draw lies far down the order
@pytest.mark.parametrize("rounded", [False, True])  # many ties
def test_a_draw_is_the_same_as_from_the_whole_sorted_vocabulary(
    spread: float, rounded: bool
) -> None:
    random = np.random.default_rng(8)
    for index in range(24):
        logits = (random.standard_normal(6000) * spread).astype(np.float32)
        logits = np.round(logits, 1) if rounded else logits
        sampling = Sampling(
            temperature=float(random.choice([0.5, 1.0, 2.0])),
            top_k=int(random.choice([0, 0, 1, 40, 9000])),
            top_p=float(random.choice([1.0, 0.9, 0.3])),
            min_p=float(random.choice([0.0, 0.0, 0.05])),
            seed=index,
        )
        assert choose(logits, sampling, index) == drawn_from_all(logits, sampling, index), sampling
