"""How far a board's numbers are from the reference's. All arithmetic in float64.

The cosine is blind to scale (it is 1 for twice the right answer), so the relative L2 error, the
worst row and the largest error stand beside it. Zero norms and non-finite values have no cosine:
they get a verdict in words instead of a NaN.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One array of a board against the reference's. None: not defined, `note` says why."""

    max_abs: float | None
    rel_l2: float | None
    cosine: float | None
    worst_row: int | None
    worst_row_rel_l2: float | None
    non_finite: int  # values of the board's
    note: str = ""


def compare(reference: npt.ArrayLike, board: npt.ArrayLike) -> Comparison:
    """Compares arrays of one shape (…, M); rows are all but the last dimension.

    Raises ValueError for different shapes, no values, or a reference that is not finite.
    """
    r, b = _pair(reference, board)
    if not np.isfinite(r).all():
        raise ValueError("the reference holds non-finite values: it cannot judge anything")
    bad = int(np.sum(~np.isfinite(b)))
    if bad:
        first = int(np.argmax(~np.isfinite(b.reshape(-1, b.shape[-1])).all(axis=1)))
        note = f"{bad} of {b.size} values are not finite, the first in row {first}"
        return Comparison(None, None, None, first, None, bad, note)
    row, worst = worst_row(r, b)
    largest, error, similarity = max_abs(r, b), rel_l2(r, b), cosine(r, b)
    return Comparison(largest, error, similarity, row, worst, 0, _zero_note(r, b))


def _zero_note(reference: Array, board: Array) -> str:
    zero_reference, zero_board = not reference.any(), not board.any()
    if zero_reference and zero_board:
        return "both are zero throughout: equal"
    if zero_reference:
        return "the reference is zero throughout, the board's values are not"
    return "the board's values are zero throughout" if zero_board else ""


def cosine(reference: npt.ArrayLike, board: npt.ArrayLike) -> float | None:
    """r·b / (|r| |b|) over all values; 1 if both are zero, None if one is or b is not finite."""
    r, b = _pair(reference, board)
    if not np.isfinite(b).all():
        return None
    # Scaled by the largest value, so that squares neither overflow nor vanish.
    scale_r, scale_b = float(np.abs(r).max()), float(np.abs(b).max())
    if scale_r == 0 or scale_b == 0:
        return 1.0 if scale_r == scale_b else None
    r, b = (r / scale_r).ravel(), (b / scale_b).ravel()
    return float(np.clip(r @ b / np.sqrt((r @ r) * (b @ b)), -1.0, 1.0))


def rel_l2(reference: npt.ArrayLike, board: npt.ArrayLike) -> float | None:
    """|b − r| / |r|; 0 if both are zero, None if only the reference is or b is not finite."""
    r, b = _pair(reference, board)
    if not np.isfinite(b).all():
        return None
    scale = float(np.abs(r).max())
    if scale == 0:
        return None if b.any() else 0.0
    return float(np.linalg.norm(((b - r) / scale).ravel()) / np.linalg.norm((r / scale).ravel()))


def max_abs(reference: npt.ArrayLike, board: npt.ArrayLike) -> float | None:
    """max |b − r|; None if b is not finite."""
    r, b = _pair(reference, board)
    return float(np.abs(b - r).max()) if np.isfinite(b).all() else None


def worst_row(reference: npt.ArrayLike, board: npt.ArrayLike) -> tuple[int | None, float | None]:
    """(row, its relative L2 error) for arrays (…, M), rows counted over all leading dimensions.

    A row is measured against its own norm, but at least a thousandth of the mean row's: next to
    nothing in a row that is next to nothing is no error. (None, None) if b is not finite or the
    reference is zero throughout.
    """
    r, b = _pair(reference, board)
    scale = float(np.abs(r).max())
    if not np.isfinite(b).all() or scale == 0:
        return None, None
    rows_r = r.reshape(-1, r.shape[-1]) / scale  # (R, M)
    rows_b = b.reshape(-1, r.shape[-1]) / scale
    norms = np.linalg.norm(rows_r, axis=1)  # (R,)
    floor = float(np.sqrt(np.mean(norms**2))) * 1e-3
    errors = np.linalg.norm(rows_b - rows_r, axis=1) / np.maximum(norms, floor)
    worst = int(np.argmax(errors))
    return worst, float(errors[worst])


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


def top1(reference_logits: npt.ArrayLike, board_logits: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether both choose the same token at each position: logits (…, V) → (…,).

    A position where the board's logits hold NaN disagrees.
    """
    r, b = _pair(reference_logits, board_logits)
    same = np.argmax(r, axis=-1) == np.argmax(b, axis=-1)
    result: npt.NDArray[np.bool_] = same & ~np.isnan(b).any(axis=-1)
    return result


def margin(logits: npt.ArrayLike) -> Array:
    """The best logit over the second best at each position: (…, V) → (…,), V ≥ 2."""
    two = np.sort(np.partition(np.asarray(logits, np.float64), -2, axis=-1)[..., -2:], axis=-1)
    result: Array = two[..., 1] - two[..., 0]
    return result


def near_tie(reference_logits: npt.ArrayLike, noise: float) -> bool:
    """Whether the reference's own choice at one position, logits (V,), is within the noise.

    `noise` is by how much a logit may differ for no bug's sake. Two logits differ, each by up to
    that much: a tie is a margin of at most twice the noise.
    """
    return bool(margin(reference_logits) <= 2 * noise)


def _pair(reference: npt.ArrayLike, board: npt.ArrayLike) -> tuple[Array, Array]:
    r, b = np.asarray(reference, np.float64), np.asarray(board, np.float64)
    if r.shape != b.shape or r.size == 0 or r.ndim == 0:
        raise ValueError(f"expected two arrays of one shape, found {r.shape} and {b.shape}")
    return r, b
