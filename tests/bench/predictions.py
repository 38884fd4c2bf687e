"""Next-token distributions, cut to what fits a line, and how two of them compare.

The reference keeps, for each position, the ids it finds most likely, with their log-probabilities
and the mass of all others. A contestant tells its own log-probabilities of the same ids. Merging
all other tokens into one class never adds divergence, so what is computed here is a lower bound of
the divergence over the whole vocabulary, and close to it.

Numpy alone: both workers import this, whatever else their environment has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TOP = 128
CLEAR_NATS = 0.5  # where the best token leads by less, rounding to 8 bits may choose another


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the float reference says after each of n tokens."""

    ids: Array  # (n, TOP) int64, most likely first
    logp: Array  # (n, TOP) float64

    @property
    def clear(self) -> Array:
        """(n,): whether the best token leads by CLEAR_NATS."""
        return np.asarray(self.logp[:, 0] - self.logp[:, 1] >= CLEAR_NATS)


def log_softmax(logits: Array) -> Array:
    """(n, V) → (n, V) float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def reference_of(logits: Array) -> Reference:
    """logits (n, V)."""
    logp = log_softmax(logits)
    count = min(TOP, logp.shape[-1])
    ids = np.argsort(-logp, axis=-1, kind="stable")[:, :count].astype(np.int64)
    return Reference(ids, np.take_along_axis(logp, ids, axis=-1))


def told(logits: Array, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A contestant's answer: its best token of each position and its log-probabilities of `ids`.

    Not a number anywhere is told as such, not hidden: JSON's NaN reaches the comparison.
    """
    logp = log_softmax(logits)
    at = np.asarray(ids, np.int64)
    return {
        "best": np.argmax(logp, axis=-1).tolist(),
        "logp": np.take_along_axis(logp, at, axis=-1).tolist(),
    }


def divergence(reference: Reference, logp: Array) -> Array:
    """KL(reference ‖ contestant) per position (n,) in nats; logp (n, TOP) is the contestant's."""
    theirs = np.asarray(logp, np.float64)
    p, q = np.exp(reference.logp), np.exp(theirs)
    rest_p = np.maximum(1.0 - p.sum(axis=-1), 1e-12)
    rest_q = np.maximum(1.0 - q.sum(axis=-1), 1e-12)
    inside = (p * (reference.logp - theirs)).sum(axis=-1)
    return np.asarray(inside + rest_p * (np.log(rest_p) - np.log(rest_q)))
