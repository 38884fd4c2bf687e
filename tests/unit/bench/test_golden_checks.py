"""The check that every speed needs, on numbers and through a worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.gates import EXACT, ROUNDED, compare, same_text
from tests.bench.predictions import divergence, log_softmax, reference_of, told

LOGITS = np.random.default_rng(3).normal(0, 3, (32, 500))


def answer(logits: np.ndarray) -> dict[str, object]:
    return told(logits, reference_of(LOGITS).ids.tolist())


def test_the_same_predictions_pass_the_exact_gate() -> None:
    check = compare("ours", EXACT, reference_of(LOGITS), answer(LOGITS.astype(np.float32)))
    assert check.failure == ""
    assert check.agreement == 1.0
    assert check.divergence < 1e-6


def test_small_noise_passes_the_gate_of_rounding_and_not_the_exact_one() -> None:
    noisy = answer(LOGITS + np.random.default_rng(4).normal(0, 0.05, LOGITS.shape))
    assert compare("ours", ROUNDED, reference_of(LOGITS), noisy).failure == ""
    assert "differ" in compare("ours", EXACT, reference_of(LOGITS), noisy).failure


@pytest.mark.parametrize("shift", [1, 7])
def test_predictions_of_other_positions_fail(shift: int) -> None:
    moved = answer(np.roll(LOGITS, shift, axis=0))
    assert "golden tokens differ" in compare("o", ROUNDED, reference_of(LOGITS), moved).failure


def test_logits_that_are_no_numbers_fail() -> None:
    broken = LOGITS.copy()
    broken[5, 9] = np.nan
    assert "not numbers" in compare("o", ROUNDED, reference_of(LOGITS), answer(broken)).failure


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 3.0))
def test_the_divergence_is_no_more_than_that_over_the_whole_vocabulary(
    seed: int, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    first = rng.normal(0, 3, (4, 300))
    second = first + rng.normal(0, noise, first.shape)
    reference = reference_of(first)
    p, q = log_softmax(first), log_softmax(second)
    whole = (np.exp(p) * (p - q)).sum(axis=-1)
    coarse = divergence(reference, np.asarray(told(second, reference.ids.tolist())["logp"]))
    assert (coarse >= -1e-9).all()
    assert (coarse <= whole + 1e-9).all()


def test_greedy_texts_must_be_the_same_until_a_near_tie() -> None:
    check = compare("ours", EXACT, reference_of(LOGITS), answer(LOGITS))
    leads = [2.0, 1.0, 1e-5, 1.0]
    assert same_text(check, [5, 6, 7, 8], leads, [5, 6, 7, 8]).failure == ""
    assert same_text(check, [5, 6, 7, 8], leads, [5, 6, 9, 1]).failure == ""
    assert "greedy token 1 is 4" in same_text(check, [5, 6, 7, 8], leads, [5, 4, 7, 8]).failure
