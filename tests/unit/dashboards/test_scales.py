from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from dashboards.scales import Scale, bounds, decimate, level, log_ticks, path, ticks, time_ticks

finite = st.floats(-1e9, 1e9, allow_nan=False)


@given(finite, st.floats(1e-6, 1e9), st.integers(1, 12))
def test_ticks_are_at_least_two_inside_the_scale_and_ascending(
    low: float, span: float, count: int
) -> None:
    scale = Scale(low, low + max(span, abs(low) * 1e-9), 500.0, 100.0)
    found = ticks(scale, count)
    places = [tick.at for tick in found]
    assert len(found) >= 2
    assert all(99.8 <= place <= 500.2 for place in places)
    assert places == sorted(places, reverse=True)


def test_ticks_are_round_numbers_with_the_digits_they_need() -> None:
    assert [tick.label for tick in ticks(Scale(0, 2100, 0, 700), 5)] == [
        "0",
        "500",
        "1\u202f000",
        "1\u202f500",
        "2\u202f000",
    ]
    assert [tick.label for tick in ticks(Scale(0.97, 1.03, 100, 0), 3)] == ["0.98", "1.00", "1.02"]


def test_upright_labels_that_would_touch_on_a_narrow_screen_are_minor() -> None:
    crowded = ticks(Scale(0, 10, 40, 0), 10)
    kept = [tick.at for tick in crowded if not tick.minor]
    assert len(kept) < len(crowded)
    assert all(abs(a - b) >= 26 for a, b in itertools.pairwise(kept))


def test_a_time_axis_uses_seconds_minutes_or_hours() -> None:
    assert time_ticks(Scale(0, 60, 0, 700), 6)[1].label == "10 s"
    assert time_ticks(Scale(0, 1800, 0, 700), 6)[1].label == "5 min"
    assert time_ticks(Scale(0, 8 * 3600, 0, 700), 8)[1].label == "1 h"


def test_a_log_axis_is_labelled_by_decades() -> None:
    labels = [tick.label for tick in log_ticks(Scale(-4, -1, 0, 700))]
    assert labels == ["1e\u22124", "1e\u22123", "1e\u22122", "1e\u22121"]


@given(st.lists(finite, max_size=20), st.booleans())
def test_bounds_are_never_empty_and_hold_every_value(values: list[float], zero: bool) -> None:
    low, high = bounds(values, zero=zero)
    assert low < high
    if not zero:
        assert all(low <= value <= high for value in values)


series = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False)), max_size=3000)


@given(series, st.integers(5, 60))
def test_thinning_keeps_both_extremes_the_ends_and_the_order(
    ys: list[float | None], columns: int
) -> None:
    xs = [float(index) for index in range(len(ys))]
    stretches = decimate(xs, ys, columns)
    kept = [point for stretch in stretches for point in stretch]
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    assert set(kept) <= set(known)
    assert kept == sorted(kept)
    if known:
        assert kept[0] == known[0]
        assert kept[-1] == known[-1]
        assert min(y for _, y in kept) == min(y for _, y in known)
        assert max(y for _, y in kept) == max(y for _, y in known)


@given(st.integers(1000, 20000))
def test_a_long_unbroken_series_is_thinned_to_a_few_points_a_column(count: int) -> None:
    stretches = decimate(range(count), [float(i * i % 97) for i in range(count)], 100)
    assert sum(len(stretch) for stretch in stretches) <= 4 * 101


def test_a_gap_in_a_measurement_breaks_the_line() -> None:
    assert decimate([0, 1, 2, 3], [1.0, None, 3.0, math.nan], 10) == [[(0, 1.0)], [(2, 3.0)]]


def test_a_path_goes_through_its_points() -> None:
    assert path([(0, 1.5), (2, 3)]) == "M0 1.5L2 3"
    assert path([]) == ""


def test_a_level_counts_the_edges_reached() -> None:
    assert [level(value, (1.0, 2.0)) for value in (0.5, 1.0, 1.5, 2.0)] == [0, 1, 1, 2]
