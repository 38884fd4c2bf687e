"""A against B on one board: interleaved pairs, an exact test, and a verdict that may be "unknown".

A board warms up, its governor moves, its memory ages: whatever was measured first is measured under
other conditions. So A and B take turns as ABBA ABBA …, each pair gives one log ratio, and what is
common to both cancels. The test flips the signs of the pairs (R. A. Fisher, "The Design of
Experiments", 1935, § 21): it needs no distribution, only that A and B are alike under the null.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MARGIN = 0.01  # of a ratio: a smaller difference is none
PAIRS = 10  # of the first look
MOST_PAIRS = 20
ALPHA = 0.01
ALPHA_MORE = 0.005  # of a second look: the first had its chance already
LEAST_PAIRS = 8  # with fewer not even pairs that all agree are below ALPHA: 2 / 2^8

BETTER, WORSE, EQUIVALENT, UNKNOWN = "better", "worse", "equivalent", "unknown"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`ratio` is B over A (median of pairs, Hodges-Lehmann), `low` … `high` its interval at 1 − α.

    `verdict` is of B: "better", "worse", "equivalent" (the interval lies inside ±1 %) or "unknown".
    `more` is how many further pairs may decide it; 0: no more are allowed.
    """

    verdict: str
    ratio: float
    low: float
    high: float
    p: float
    pairs: int
    more: int

    @property
    def sentence(self) -> str:
        told = {
            BETTER: "B is better than A",
            WORSE: "B is worse than A",
            EQUIVALENT: f"B equals A within {MARGIN:.0%}",
            UNKNOWN: "it cannot be told whether B differs from A",
        }[self.verdict]
        more = f"; {self.more} more pairs may tell" if self.more else ""
        return (
            f"{told}: B / A = {self.ratio:.3f} ({self.low:.3f} … {self.high:.3f}), "
            f"{self.pairs} pairs, p = {self.p:.2g}{more}"
        )


def order(pairs: int) -> str:
    """The order of `pairs` pairs: "ABBAABBA…", so that a linear drift hits both alike."""
    return "".join("ABBA"[2 * (n % 2) : 2 * (n % 2) + 2] for n in range(pairs))


def compare(a: npt.ArrayLike, b: npt.ArrayLike, *, larger_is_better: bool = False) -> Comparison:
    """Judges pairs a (N,), b (N,) of positive values, such as seconds per token.

    With up to 10 pairs α is .01; beyond, the second look, .005. A difference counts from 1 % on.
    Raises ValueError for arrays that are no pairs, values that are not positive, and more than 20.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"expected two arrays of one length, found {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        raise ValueError("values of pairs must be positive and finite")
    n = len(x)
    if n > MOST_PAIRS:
        raise ValueError(f"{n} pairs, at most {MOST_PAIRS}: decide before how many there are")
    if n == 0:
        return Comparison(UNKNOWN, 1.0, 0.0, math.inf, 1.0, 0, PAIRS)
    logs = np.log(y / x)
    alpha = ALPHA if n <= PAIRS else ALPHA_MORE
    p = sign_flip_p(logs)
    low, high = interval(logs, 1 - alpha)
    middle = float(np.median(_walsh(logs)))
    return Comparison(
        verdict=_verdict(middle, low, high, p, alpha, n, 1 if larger_is_better else -1),
        ratio=math.exp(middle),
        low=math.exp(low),
        high=math.exp(high),
        p=p,
        pairs=n,
        more=_more(n, middle, low, high, p, alpha),
    )


def _verdict(
    middle: float, low: float, high: float, p: float, alpha: float, n: int, better: int
) -> str:
    margin = math.log1p(MARGIN)
    if n >= LEAST_PAIRS and p < alpha and abs(middle) >= margin:
        return BETTER if middle * better > 0 else WORSE
    if n >= LEAST_PAIRS and -margin < low and high < margin:
        return EQUIVALENT
    return UNKNOWN


def _more(n: int, middle: float, low: float, high: float, p: float, alpha: float) -> int:
    if n < PAIRS:
        return PAIRS - n
    undecided = _verdict(middle, low, high, p, alpha, n, 1) == UNKNOWN
    return MOST_PAIRS - n if undecided else 0


def sign_flip_p(logs: npt.ArrayLike) -> float:
    """Two-sided p of the mean of logs (N,), N ≤ 24, over all 2^N choices of signs, exactly."""
    x = np.asarray(logs, np.float64)
    if len(x) > 24:
        raise ValueError(f"{len(x)} values, at most 24 are tested exactly")
    sums = np.add.outer(_signed_sums(x[: len(x) // 2]), _signed_sums(x[len(x) // 2 :]))
    least = abs(float(x.sum())) * (1 - 1e-12)  # of equal sums, rounding makes some smaller
    return float(np.mean(np.abs(sums) >= least))


def _signed_sums(x: Array) -> Array:
    sums = np.zeros(1)
    for value in np.abs(x):
        sums = np.concatenate([sums - value, sums + value])
    return sums


def interval(logs: npt.ArrayLike, level: float) -> tuple[float, float]:
    """(low, high) of the centre of logs (N,): the signed-rank interval, exact in level or above it.

    J. L. Hodges, E. L. Lehmann, "Estimates of location based on rank tests", Ann. Math. Stat. 34,
    1963. Without enough pairs for the level it is (−∞, ∞).
    """
    x = np.asarray(logs, np.float64)
    means = np.sort(_walsh(x))
    below = np.cumsum(_signed_rank(len(x)))
    # The largest rank sum that is reached or fallen below in less than half of 1 − level.
    allowed = int(np.searchsorted(below, (1 - level) / 2 * (1 + 1e-12), side="right"))
    if allowed == 0:
        return -math.inf, math.inf
    return float(means[allowed - 1]), float(means[len(means) - allowed])


def _walsh(x: Array) -> Array:
    """Means of all pairs of values, each with itself included."""
    first, second = np.triu_indices(len(x))
    means: Array = (x[first] + x[second]) / 2
    return means


@functools.cache
def _signed_rank(n: int) -> Array:
    """P(W = w) of Wilcoxon's signed-rank sum, w = 0 … n (n + 1) / 2."""
    counts = np.ones(1)
    for rank in range(1, n + 1):
        longer = np.zeros(len(counts) + rank)
        longer[: len(counts)] += counts
        longer[rank:] += counts
        counts = longer
    shares: Array = counts / counts.sum()
    return shares


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many pairs find a difference of `effect` on a board whose pairs scatter by `sd`.

    `power` is the share of tries in which it is found; `enough` whether that reaches what was
    asked within the most pairs.
    """

    effect: float
    sd: float
    pairs: int
    power: float
    enough: bool
    minutes: float | None

    @property
    def sentence(self) -> str:
        took = "" if self.minutes is None else f", {self.minutes:.0f} minutes"
        if self.enough:
            return f"{self.effect:.1%} on this board needs {self.pairs} pairs{took}"
        return (
            f"{self.effect:.1%} cannot be found reliably on this board: {self.pairs} pairs{took} "
            f"find it in {self.power:.0%} of tries (pairs scatter by {self.sd:.1%})"
        )


def plan(
    effect: float,
    sd: float,
    *,
    seconds_per_pair: float | None = None,
    power: float = 0.9,
    tries: int = 300,
    seed: int = 0,
) -> Plan:
    """The fewest pairs, 8 to 20, that find a true difference of `effect` (0.02: 2 %).

    `sd` is the standard deviation of a pair's log ratio on this board, as equal versions gave it.
    By simulation of the very test, heavy tails included (t with 5 degrees). Raises ValueError for
    an effect that is no difference.
    """
    if not effect > MARGIN:
        raise ValueError(f"a difference of {effect:.2%} is none: expected more than {MARGIN:.0%}")
    rng = np.random.default_rng(seed)
    noise = rng.standard_t(5, (tries, MOST_PAIRS)) * sd / math.sqrt(5 / 3)
    found = 0.0
    for pairs in range(LEAST_PAIRS, MOST_PAIRS + 1):
        found = _found(noise[:, :pairs] + math.log1p(effect))
        if found >= power:
            break
    minutes = None if seconds_per_pair is None else pairs * seconds_per_pair / 60
    return Plan(effect, sd, pairs, found, found >= power, minutes)


def _found(logs: Array) -> float:
    """The share of rows (tries, N) that are told as a difference."""
    alpha = ALPHA if logs.shape[1] <= PAIRS else ALPHA_MORE
    margin = math.log1p(MARGIN)
    hits = [
        abs(float(np.median(_walsh(row)))) >= margin and sign_flip_p(row) < alpha for row in logs
    ]
    return float(np.mean(hits))
