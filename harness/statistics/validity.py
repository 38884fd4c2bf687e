"""May a timing be judged at all? The gate before every verdict about speed."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

MIN_SAMPLES = 30
MAX_SPREAD = 0.05

VALID, UNKNOWN, INVALID = "valid", "unknown", "invalid"


@dataclasses.dataclass(frozen=True)
class Validity:
    """`state` is "valid", "unknown" (the board exposes no clocks) or "invalid"."""

    state: str
    reason: str
    samples: int = 0
    spread: float | None = None
    median_mhz: float | None = None

    @property
    def text(self) -> str:
        """For the record: "valid", "unknown", or why it is invalid."""
        return self.reason if self.state == INVALID else self.state


def clock_gate(clocks_mhz: npt.ArrayLike) -> Validity:
    """Judges the clock samples of a run's busy seconds, clocks_mhz (N,); NaN means not exposed.

    Valid: at least 30 samples, whose 5th and 95th percentile lie within 5 % of the median. A
    percentile rather than the extremes: a governor's single odd reading is no throttling. Without
    any sample the clocks are "unknown": a verdict may be given, and carries that word.
    """
    clocks = np.asarray(clocks_mhz, np.float64).ravel()
    clocks = clocks[np.isfinite(clocks) & (clocks > 0)]
    n = len(clocks)
    if n == 0:
        return Validity(UNKNOWN, "the board exposes no clocks")
    median = float(np.median(clocks))
    low, high = np.percentile(clocks, [5, 95])
    spread = float(high - low) / median
    if n < MIN_SAMPLES:
        return Validity(
            INVALID, f"{n} busy clock samples, {MIN_SAMPLES} are needed", n, spread, median
        )
    if spread > MAX_SPREAD:
        return Validity(
            INVALID,
            f"the clock moved by {spread:.1%} within the run ({low:.0f} to {high:.0f} MHz), "
            f"at most {MAX_SPREAD:.0%} may be judged",
            n,
            spread,
            median,
        )
    return Validity(
        VALID, f"the clock held {median:.0f} MHz within {spread:.1%}", n, spread, median
    )
