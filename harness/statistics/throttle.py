"""When was a busy board's clock down? One rule for the verdict and for the page that shows it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

THROTTLED = 0.95  # of the usual clock; below it a busy core counts as throttled
USUAL_PERCENTILE = 90.0  # of the busy clocks: a top that lasted, not one boost


def throttled_spans(
    t_s: npt.ArrayLike, clock_mhz: npt.ArrayLike, busy: npt.ArrayLike
) -> list[tuple[float, float]]:
    """(from, to) in seconds, in order and apart, with the clock of a busy engine down.

    t_s (n,) ascending, clock_mhz (n,) with NaN where unknown, busy (n,) truth values. A sample
    stands for the time since the one before it. Empty with fewer than two known clocks.
    """
    t, clock = np.asarray(t_s, np.float64), np.asarray(clock_mhz, np.float64)
    known: npt.NDArray[np.bool_] = np.isfinite(clock) & np.asarray(busy, np.bool_)
    if np.count_nonzero(known) < 2:
        return []
    usual = np.percentile(clock[known], USUAL_PERCENTILE)
    low: npt.NDArray[np.bool_] = known & (clock < THROTTLED * usual)
    spans: list[tuple[float, float]] = []
    for index in np.flatnonzero(low).tolist():
        start, end = float(t[max(0, index - 1)]), float(t[index])
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return [span for span in spans if span[1] > span[0]]
