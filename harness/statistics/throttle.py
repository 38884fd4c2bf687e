"""When was a busy board's clock down? One rule for the verdict and for the page that shows it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

THROTTLED = 0.95  # of the usual clock; below it a busy core counts as throttled
BUSY_PERCENT = 50.0  # of one core; an idle core's clock says nothing
LASTING_S = 2.5  # shorter is an odd reading of a governor
USUAL_PERCENTILE = 90.0  # of the busy clocks: a top that lasted, not one boost


def throttled_spans(
    t_s: npt.ArrayLike, clock_mhz: npt.ArrayLike, busy: npt.ArrayLike
) -> list[tuple[float, float]]:
    """(from, to) in seconds, in order and apart, with the clock of a busy engine down.

    t_s (n,) ascending, clock_mhz (n,) with NaN where unknown, busy (n,) truth values. A sample
    stands for the time since the one before it, and a span goes on until a busy sample is back at
    the usual clock. Empty with fewer than two known clocks.
    """
    t, clock = np.asarray(t_s, np.float64), np.asarray(clock_mhz, np.float64)
    known: npt.NDArray[np.bool_] = np.isfinite(clock) & np.asarray(busy, np.bool_)
    if np.count_nonzero(known) < 2:
        return []
    usual = np.percentile(clock[known], USUAL_PERCENTILE)
    spans: list[tuple[float, float]] = []
    down = False
    for index in np.flatnonzero(known).tolist():
        low = bool(clock[index] < THROTTLED * usual)
        if low and down:
            spans[-1] = (spans[-1][0], float(t[index]))
        elif low:
            spans.append((float(t[max(0, index - 1)]), float(t[index])))
        down = low
    return [(start, end) for start, end in spans if end - start >= LASTING_S]
