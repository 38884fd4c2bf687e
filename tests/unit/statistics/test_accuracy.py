"""How far arrays are apart, and what is said where a number has no meaning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from harness.statistics.accuracy import (
    compare,
    cosine,
    kl,
    margin,
    max_abs,
    near_tie,
    rel_l2,
    top1,
    worst_row,
)

RNG = np.random.default_rng(1)
REFERENCE = RNG.standard_normal((6, 32))  # (P, M)


def test_the_cosine_is_blind_to_scale_and_the_relative_error_is_not() -> None:
    assert cosine(REFERENCE, REFERENCE * 1.02) == pytest.approx(1.0)
    assert rel_l2(REFERENCE, REFERENCE * 1.02) == pytest.approx(0.02)


def test_opposite_and_perpendicular_vectors() -> None:
    assert cosine([1.0, 0.0], [-2.0, 0.0]) == -1.0
    assert cosine([1.0, 0.0], [0.0, 5.0]) == 0.0


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_very_small_and_very_large_values_neither_vanish_nor_overflow(scale: float) -> None:
    board = REFERENCE + 0.01 * RNG.standard_normal(REFERENCE.shape)
    assert cosine(REFERENCE * scale, board * scale) == pytest.approx(cosine(REFERENCE, board))
    assert rel_l2(REFERENCE * scale, board * scale) == pytest.approx(rel_l2(REFERENCE, board))


def test_float32_input_is_compared_in_float64() -> None:
    reference = np.full(4096, 1.0, np.float32)
    board = reference.copy()
    board[0] += np.float32(2**-20)
    assert rel_l2(reference, board) == pytest.approx(2**-20 / 64)


def test_one_bad_row_shows_where_the_whole_hardly_does() -> None:
    board = REFERENCE.copy()
    board[4] *= 1.5
    row, error = worst_row(REFERENCE, board)
    assert row == 4
    assert error == pytest.approx(0.5)
    assert max_abs(REFERENCE, board) == pytest.approx(0.5 * np.abs(REFERENCE[4]).max())


def test_noise_in_a_row_that_is_next_to_nothing_is_no_error() -> None:
    reference = REFERENCE.copy()
    reference[2] = 1e-12
    board = reference + 1e-9
    _, error = worst_row(reference, board)
    assert error is not None
    assert error < 1e-4


def test_non_finite_values_are_counted_and_nothing_is_claimed_about_the_rest() -> None:
    board = REFERENCE.copy()
    board[3, 5], board[4, 0] = np.nan, np.inf
    found = compare(REFERENCE, board)
    assert found.non_finite == 2
    assert (found.cosine, found.rel_l2, found.max_abs) == (None, None, None)
    assert found.worst_row == 3
    assert "2 of 192 values are not finite, the first in row 3" in found.note


@pytest.mark.parametrize(
    ("reference", "board", "similarity", "error", "note"),
    [
        (0.0, 0.0, 1.0, 0.0, "both are zero"),
        (0.0, 1.0, None, None, "the reference is zero"),
        (1.0, 0.0, None, 1.0, "the board's values are zero"),
    ],
)
def test_zero_norms_get_a_verdict_in_words(
    reference: float, board: float, similarity: float | None, error: float | None, note: str
) -> None:
    found = compare(np.full((2, 3), reference), np.full((2, 3), board))
    assert (found.cosine, found.rel_l2) == (similarity, error)
    assert note in found.note


def test_a_reference_that_is_not_finite_cannot_judge() -> None:
    with pytest.raises(ValueError, match="reference holds non-finite"):
        compare(np.array([1.0, np.nan]), np.array([1.0, 1.0]))


def test_arrays_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(6, 32\) and \(6, 31\)"):
        compare(REFERENCE, REFERENCE[:, :31])


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 30.0))
@settings(max_examples=50, deadline=None)
def test_kl_equals_its_definition_and_is_never_negative(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    r, b = rng.standard_normal((2, 4, 50)) * spread
    expected = rel_entr(softmax(r, axis=-1), softmax(b, axis=-1)).sum(axis=-1)
    assert kl(r, b) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert (kl(r, b) >= 0).all()
    assert kl(r, r + 3.0) == pytest.approx(np.zeros(4), abs=1e-12)


def test_kl_takes_masked_tokens_and_refuses_to_hide_broken_ones() -> None:
    r = np.array([[0.0, 1.0, -np.inf]] * 4)
    b = np.array([[0.0, 1.0, -np.inf], [0.0, np.nan, 1.0], [0.0, -np.inf, 1.0], [0.0, np.inf, 0.0]])
    assert kl(r, b).tolist() == [0.0, np.inf, np.inf, np.inf]


def test_top1_agrees_where_both_choose_the_same_token() -> None:
    r = np.array([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    b = np.array([[1.0, 1.5, 0.0], [3.0, 2.0, 0.0], [np.nan, 2.0, 0.0]])
    assert top1(r, b).tolist() == [True, False, False]


def test_a_tie_is_near_where_noise_could_turn_it() -> None:
    logits = np.array([5.0, 1.0, 4.99, -3.0])
    assert margin(logits) == pytest.approx(0.01)
    assert near_tie(logits, noise=0.006)
    assert not near_tie(logits, noise=0.004)
