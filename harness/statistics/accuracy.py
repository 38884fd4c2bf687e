"""How far a board's distribution of the next token is from the reference's, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

Array = npt.NDArray[np.float64]


def kl(reference_logits: npt.ArrayLike, board_logits: npt.ArrayLike) -> Array:
    """KL(reference ‖ board) at each position in nats: logits (…, V) → (…,), never negative.

    Infinite where the board's logits are not numbers, or rule out what the reference allows.
    Raises ValueError for different shapes or a reference with NaN.
    """
    r, b = _pair(reference_logits, board_logits)
    if np.isnan(r).any():
        raise ValueError("the reference's logits hold NaN")
    usable = ~(np.isnan(b) | (b == np.inf)).any(axis=-1) & (b > -np.inf).any(axis=-1)  # (…,)
    log_p = log_softmax(r, axis=-1)
    log_q = log_softmax(np.where(usable[..., None], b, 0.0), axis=-1)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):  # −inf − −inf where both rule a token out
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding leaves sums such as −1e-17 for equal distributions.
    result: Array = np.where(usable, np.maximum(terms.sum(axis=-1), 0.0), np.inf)
    return result


def _pair(reference: npt.ArrayLike, board: npt.ArrayLike) -> tuple[Array, Array]:
    r, b = np.asarray(reference, np.float64), np.asarray(board, np.float64)
    if r.shape != b.shape or r.size == 0 or r.ndim == 0:
        raise ValueError(f"expected two arrays of one shape, found {r.shape} and {b.shape}")
    return r, b
