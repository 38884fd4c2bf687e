"""The gate before every verdict about speed."""

from __future__ import annotations

import numpy as np

from harness.statistics.validity import clock_gate

STEADY = 1800 + np.random.default_rng(1).normal(0, 5, 60)  # MHz


def test_a_steady_clock_is_valid() -> None:
    gate = clock_gate(STEADY)
    assert (gate.state, gate.text) == ("valid", "valid")
    assert gate.samples == 60


def test_a_board_without_clocks_is_unknown_not_invalid() -> None:
    for clocks in ([], [float("nan")] * 40, [0.0] * 40):
        gate = clock_gate(clocks)
        assert (gate.state, gate.text) == ("unknown", "unknown")


def test_fewer_than_thirty_busy_samples_are_invalid() -> None:
    assert clock_gate(STEADY[:30]).state == "valid"
    assert "29 busy clock samples" in clock_gate(STEADY[:29]).text


def test_a_throttled_run_is_invalid_and_says_from_where_to_where() -> None:
    gate = clock_gate(np.concatenate([STEADY, STEADY * 0.8]))
    assert gate.state == "invalid"
    assert "14" in gate.text
    assert "18" in gate.text


def test_one_odd_reading_is_no_throttling() -> None:
    clocks = STEADY.copy()
    clocks[7] = 600
    assert clock_gate(clocks).state == "valid"
