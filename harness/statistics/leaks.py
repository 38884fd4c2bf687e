"""Does a process leak? Judged from its resident memory over time.

The warm-up is dropped, the rest is cut into ten blocks of time, and each block's median stands for
it, so that the sawtooth of an allocator and single spikes vanish. A leak has all of:

- an upward trend by the exact Mann-Kendall test, one-sided p < .01 (H. Mann, "Nonparametric tests
  against trend", Econometrica 13, 1945; M. Kendall, "Rank Correlation Methods", 1948);
- growth of at least 5 MB by the Theil-Sen slope, the median of all pairs' slopes (P. Sen,
  "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968);
- a slope in the second half of at least half the first half's: an allocator that is still filling
  its pools slows down, a leak does not.

Plain least squares, which takes its samples for independent, calls a leak in a third of clean runs.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy import stats

BLOCKS = 10
WARM_UP_S = 300.0
LONG_WARM_UP_S = 600.0  # where the allocator still grows after the first one
MIN_BLOCK_S = 60.0  # and five samples; shorter blocks keep the allocator's sawtooth
MIN_GROWTH_MB = 5.0
MAX_P = 0.01

NONE, LEAK, TOO_SHORT = "none", "leak", "too short to tell"


@dataclasses.dataclass(frozen=True)
class Leak:
    """`verdict` is "none", "leak" or "too short to tell"; then all numbers are None."""

    verdict: str
    reason: str  # one sentence
    growth_mb: float | None = None  # Theil-Sen, over the judged time
    mb_per_hour: float | None = None
    p: float | None = None
    warm_up_s: float | None = None
    judged_s: float | None = None
    late_over_early: float | None = None  # slope ratio; None where the first half does not grow


def judge_leak(
    t_s: npt.ArrayLike, rss_mb: npt.ArrayLike, attempts: npt.ArrayLike | None = None
) -> Leak:
    """Judges memory samples. t_s (N,) seconds, rss_mb (N,) MB; non-finite samples are left out.

    `attempts` (N,) numbers the process that a sample is of: a restarted process begins anew, so
    the one with the longest record is judged. Raises ValueError for arrays of different lengths.
    """
    t, rss = np.asarray(t_s, np.float64), np.asarray(rss_mb, np.float64)  # (N,), (N,)
    attempt = np.zeros(t.shape) if attempts is None else np.asarray(attempts)
    if not (t.shape == rss.shape == attempt.shape) or t.ndim != 1:
        raise ValueError(f"expected arrays of one length: {t.shape} {rss.shape} {attempt.shape}")
    good = np.isfinite(t) & np.isfinite(rss)
    t, rss, attempt = t[good], rss[good], attempt[good]
    if len(t) == 0:
        return Leak(TOO_SHORT, "there is no memory sample")
    names = np.unique(attempt)
    spans = [float(np.ptp(t[attempt == name])) for name in names]
    own = attempt == names[int(np.argmax(spans))]
    order = np.argsort(t[own], kind="stable")
    t, rss = t[own][order] - t[own].min(), rss[own][order]

    warm_up = _warm_up(t, rss)
    needed = warm_up + BLOCKS * MIN_BLOCK_S
    if t[-1] < needed * 0.999:  # the last sample falls a second short of a full run
        return Leak(
            TOO_SHORT,
            f"one process was watched for {t[-1]:.0f} s; a verdict needs {needed:.0f} s",
        )
    edges = np.linspace(warm_up, t[-1], BLOCKS + 1)
    block = np.searchsorted(edges[1:-1], t[t >= warm_up], side="right")  # (n,) 0 … 9
    late = rss[t >= warm_up]
    counts = np.bincount(block, minlength=BLOCKS)
    if counts.min() < 5:
        return Leak(
            TOO_SHORT,
            f"a tenth of the run has {counts.min()} memory samples; a verdict needs five in each",
        )
    medians = np.array([np.median(late[block == index]) for index in range(BLOCKS)])
    centers = (edges[1:] + edges[:-1]) / 2
    judged_s = float(t[-1] - warm_up)
    slope = _slope(medians, centers)
    half = BLOCKS // 2
    early_slope, late_slope = (
        _slope(medians[:half], centers[:half]),
        _slope(medians[half:], centers[half:]),
    )
    growth = slope * judged_s
    p = mann_kendall_p(medians)
    lasting = late_slope > 0 and late_slope >= early_slope / 2
    leaks = p < MAX_P and growth >= MIN_GROWTH_MB and lasting
    if leaks:
        reason = (
            f"memory grew by {growth:.1f} MB in {judged_s / 60:.0f} minutes and goes on (p {p:.1g})"
        )
    elif p < MAX_P and growth >= MIN_GROWTH_MB:
        reason = f"memory grew by {growth:.1f} MB, but the growth dies down"
    elif p < MAX_P:
        reason = f"memory grew by {growth:.1f} MB, less than the {MIN_GROWTH_MB:.0f} MB that count"
    else:
        reason = f"memory shows no trend (p {p:.2g})"
    return Leak(
        LEAK if leaks else NONE,
        reason,
        growth_mb=growth,
        mb_per_hour=slope * 3600,
        p=p,
        warm_up_s=warm_up,
        judged_s=judged_s,
        late_over_early=late_slope / early_slope if early_slope > 0 else None,
    )


def _warm_up(t: npt.NDArray[np.float64], rss: npt.NDArray[np.float64]) -> float:
    """Five minutes, or ten if most of the growth behind the fifth lies before the tenth."""

    def level(at: float) -> float:
        near = rss[(t >= at - 30) & (t <= at + 30)]
        return float(np.median(near)) if len(near) else math.nan

    start, middle, end = level(WARM_UP_S), level(LONG_WARM_UP_S), level(float(t[-1]) - 30)
    growing = middle - start >= MIN_GROWTH_MB / 2 and middle - start > (end - start) / 2
    return LONG_WARM_UP_S if growing else WARM_UP_S


def _slope(values: npt.NDArray[np.float64], at: npt.NDArray[np.float64]) -> float:
    return float(stats.theilslopes(values, at)[0])


def mann_kendall_p(values: npt.ArrayLike) -> float:
    """One-sided exact p of an upward trend in values (n,).

    S = Σ sign(v_j − v_i) over i < j; p = P(S ≥ s) when every order is equally likely. Tied pairs
    add nothing to S, and the distribution without ties is used for them too: that of a tied sample
    is narrower, so p is never too small by it.
    """
    v = np.asarray(values, np.float64)
    n = len(v)
    pairs = n * (n - 1) // 2
    s = int(np.sum(np.sign(v[None, :] - v[:, None])[np.triu_indices(n, 1)]))
    # S = pairs − 2·inversions, and the orders of n values with k inversions are counted by
    # Π (1 + q + … + q^(j−1)), j = 1 … n (Knuth, TAOCP 3, 5.1.1).
    orders = np.ones(1)
    for j in range(2, n + 1):
        orders = np.convolve(orders, np.ones(j))
    most = (pairs - s) // 2
    return float(orders[: most + 1].sum() / orders.sum())
