"""The choice of the next token from logits, with a random stream of its own.

The stream is Philox 4×64 (Salmon et al. 2011) keyed by the seed and counted by the token's index,
so the n-th draw does not depend on threads, hardware or how many draws came before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FIRST_SORTED = 256  # of the likeliest tokens


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
    penalised = sampling.repetition_penalty != 1.0 and len(previous)
    if sampling.temperature == 0.0 and not penalised:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64)
    if penalised:
        seen = np.unique(np.asarray(previous, np.int64))
        factor = sampling.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
    if sampling.temperature == 0.0:
        return int(np.argmax(scores))
    return _drawn(scores, sampling, uniform(sampling.seed, index))


def _drawn(scores: npt.NDArray[np.float64], sampling: Sampling, draw: float) -> int:
    """The token at `draw` (0..1) of what the filters leave, the likeliest first.

    Sorting a whole vocabulary takes longer than a decode step, so the likeliest are sorted, and
    more of them only while the draw lies beyond.
    """
    count = len(scores)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        weights = np.exp((scores - scores.max()) / sampling.temperature)
    if sampling.top_k:
        order = _likeliest(scores, min(sampling.top_k, count))[: sampling.top_k]
        return _within(
            order, weights[order], float(weights[order].sum()), sampling, draw, whole=True
        )[0]
    total, wanted = float(weights.sum()), FIRST_SORTED
    while True:
        whole = wanted >= count
        order = _likeliest(scores, min(wanted, count))
        token, found = _within(order, weights[order], total, sampling, draw, whole=whole)
        if found:
            return token
        wanted *= 16


def _likeliest(scores: npt.NDArray[np.float64], wanted: int) -> npt.NDArray[np.int64]:
    """At least `wanted` ids by falling score, ties by id; whoever ties with the last is there."""
    least = np.partition(scores, len(scores) - wanted)[len(scores) - wanted]
    ids = np.flatnonzero(scores >= least)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _within(
    order: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    total: float,
    sampling: Sampling,
    draw: float,
    *,
    whole: bool,
) -> tuple[int, bool]:
    """The token at `draw` of sorted `weights`, of which there are more unless `whole`; and whether
    it is settled, which it is not when the filters or the draw reach behind them."""
    cumulative = np.cumsum(weights / total)
    kept = len(weights)
    if sampling.top_p < 1.0:
        # The smallest set whose mass reaches top_p: the token that crosses it belongs to it.
        kept = min(kept, int(np.searchsorted(cumulative, sampling.top_p, side="left")) + 1)
    if sampling.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    ended = whole or kept < len(weights)
    mass = cumulative[kept - 1] if ended else 1.0
    if not ended and (sampling.top_p < 1.0 or sampling.min_p > 0.0):
        return 0, False
    position = int(np.searchsorted(cumulative[:kept], draw * mass, side="right"))
    if position >= kept and not ended:
        return 0, False
    return int(order[min(position, kept - 1)]), True
