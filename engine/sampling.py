"""The choice of the next token from logits, with a random stream of its own.

The stream is Philox 4×64 (Salmon et al. 2011) keyed by the seed and counted by the token's index,
so the n-th draw does not depend on threads, hardware or how many draws came before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; 0 or 1 switch a filter off.

    Filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.temperature >= 0, "temperature", self.temperature, "0 or more"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (off) or more"),
            (0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)"),
            (0 <= self.min_p < 1, "min_p", self.min_p, "0 (off) or more and below 1"),
            (self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0"),
            (0 <= self.seed < 2**64, "seed", self.seed, "a whole number from 0 to 2^64 - 1"),
        )
        for good, name, found, expected in checks:
            if not good:
                raise ValueError(f"{name} is {found!r}, expected {expected}")


def uniform(seed: int, index: int) -> float:
    """The stream's draw for token `index`: in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index << 8)).random())


def choose(
    logits: npt.NDArray[np.float32], sampling: Sampling, index: int, previous: Sequence[int] = ()
) -> int:
    """Token id for `logits` (V,). `index` numbers the draw, `previous` are tokens to penalise.

    Ties go to the lowest id. The repetition penalty divides positive and multiplies negative logits
    (Keskar et al. 2019).
    """
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1.0 and len(previous):
        seen = np.unique(np.asarray(previous, np.int64))
        penalised = scores[seen]
        factor = sampling.repetition_penalty
        scores[seen] = np.where(penalised > 0, penalised / factor, penalised * factor)
    if sampling.temperature == 0.0:
        return int(np.argmax(scores))
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        kept = (scores[order] - scores[order[0]]) / sampling.temperature
    probabilities = np.exp(kept)
    probabilities /= probabilities.sum()
    if sampling.top_p < 1.0:
        # The smallest set whose mass reaches top_p: the token that crosses it belongs to it.
        before = np.cumsum(probabilities) - probabilities
        probabilities = probabilities[before < sampling.top_p]
    if sampling.min_p > 0.0:
        probabilities = probabilities[probabilities >= sampling.min_p * probabilities[0]]
    cumulative = np.cumsum(probabilities)
    draw = uniform(sampling.seed, index) * cumulative[-1]
    position = int(np.searchsorted(cumulative, draw, side="right"))
    return int(order[min(position, len(cumulative) - 1)])
