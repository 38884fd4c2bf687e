"""When a busy clock counts as down."""

from __future__ import annotations

import numpy as np
import pytest

from harness.statistics.throttle import throttled_spans

T = np.arange(600.0)
BUSY = np.ones(600, bool)


def clocks(*low: tuple[int, int], mhz: float = 1500.0) -> np.ndarray:
    found = np.full(600, 1800.0)
    for start, end in low:
        found[start:end] = mhz
    return found


def test_each_lasting_drop_is_one_span() -> None:
    assert throttled_spans(T, clocks((100, 130), (400, 500)), BUSY) == [(99, 129), (399, 499)]


@pytest.mark.parametrize(("share", "count"), [(0.96, 0), (0.94, 1)])
def test_five_per_cent_below_the_usual_clock_count(share: float, count: int) -> None:
    assert len(throttled_spans(T, clocks((300, 400), mhz=share * 1800), BUSY)) == count


def test_one_odd_reading_is_no_throttling() -> None:
    assert throttled_spans(T, clocks((300, 301), mhz=600.0), BUSY) == []


def test_an_idle_clock_says_nothing_and_ends_nothing() -> None:
    idle = BUSY.copy()
    idle[100:200] = idle[350:353] = False
    found = clocks((100, 200), (300, 400))
    found[350:353] = 1800.0
    assert throttled_spans(T, found, idle) == [(299, 399)]


def test_one_boost_does_not_set_the_usual_clock() -> None:
    assert throttled_spans(T, clocks((10, 15), mhz=2600.0), BUSY) == []


def test_without_clocks_there_is_no_span() -> None:
    assert throttled_spans(T, np.full(600, np.nan), BUSY) == []
    assert throttled_spans([], [], []) == []
