"""The divergence of two distributions, and what is said where they are broken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from harness.statistics.accuracy import kl


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 30.0))
@settings(max_examples=50)
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


def test_arrays_of_different_shapes_and_broken_references_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
        kl(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="NaN"):
        kl(np.array([[0.0, np.nan]]), np.array([[0.0, 1.0]]))
