"""Intervals for a mean of unknown shape, and for a share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats


def percentile_interval(
    groups: Sequence[npt.ArrayLike],
    percentile: float,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """(low, high) for a percentile (0–100) of values that come in groups: whole groups are drawn
    anew, because values of one group are alike (A. C. Davison and D. V. Hinkley, "Bootstrap Methods
    and their Application", 1997, section 3.8). Raises ValueError for no or empty groups.
    """
    parts = [np.asarray(group, np.float64) for group in groups]
    if not parts or any(part.ndim != 1 or not part.size for part in parts):
        raise ValueError("expected groups of values, found none or an empty one")
    rng = np.random.default_rng(seed)
    found = [
        np.percentile(np.concatenate([parts[index] for index in chosen]), percentile)
        for chosen in rng.integers(0, len(parts), (resamples, len(parts)))
    ]
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_interval(
    values: npt.ArrayLike, *, level: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """(low, high) for the mean of values (n,), by the bias-corrected and accelerated bootstrap.

    B. Efron, "Better bootstrap confidence intervals", JASA 82, 1987: percentiles of the resampled
    means at Φ(z0 + (z0 + z) / (1 − a (z0 + z))), with z0 from the share of means below the
    observed one and a from the jackknife; the plain percentiles are too narrow for skewed values
    such as KL divergences. A single value, or equal ones, give an interval of no width.

    Raises ValueError for no values or non-finite ones.
    """
    v = np.asarray(values, np.float64)
    if v.ndim != 1 or len(v) == 0 or not np.isfinite(v).all():
        raise ValueError(f"expected finite values in one dimension, found shape {v.shape}")
    n, mean = len(v), float(v.mean())
    if np.ptp(v) == 0:
        return mean, mean
    rng = np.random.default_rng(seed)
    # In slices, so that long runs do not need resamples × n numbers at once.
    size = max(1, 2**22 // n)
    means = np.concatenate(
        [
            v[rng.integers(0, n, (min(size, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, size)
        ]
    )  # (resamples,)
    # Half of the ties count as below, or repeated values would look like bias.
    below = (np.sum(means < mean) + np.sum(means == mean) / 2) / resamples
    z0 = float(stats.norm.ppf(np.clip(below, 1 / resamples, 1 - 1 / resamples)))
    off = v - mean  # leaving value i out moves the mean by (mean − v_i) / (n − 1)
    acceleration = float(np.sum(off**3) / (6 * np.sum(off**2) ** 1.5))
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    z = z0 + stats.norm.ppf(tails)
    low, high = np.quantile(means, stats.norm.cdf(z0 + z / (1 - acceleration * z)))
    return float(low), float(high)


def wilson(successes: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """(low, high) for a share of successes.

    E. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22,
    1927. Unlike mean ± standard errors it stays within 0 … 1 and has a width at 0 of n and n of n.
    No trials tell nothing: (0, 1). Raises ValueError unless 0 ≤ successes ≤ trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    z = float(stats.norm.ppf((1 + level) / 2))
    share = successes / trials
    center = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + (z / trials / 2) ** 2)
    # Exact at the ends, where rounding would leave 1e-17.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == trials else min(1.0, center + half)
    return low, high
