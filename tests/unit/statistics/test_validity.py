"""The gate before every verdict about speed."""

from __future__ import annotations

import numpy as np
import pytest

from harness.statistics.validity import arms_gate, clock_gate

STEADY = 1800 + np.random.default_rng(1).normal(0, 5, 60)  # MHz


def test_a_steady_clock_is_valid() -> None:
    gate = clock_gate(STEADY, boot_ids=["a", "a"])
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


def test_a_reset_within_the_run_is_invalid_even_without_clocks() -> None:
    assert "reset" in clock_gate([], boot_ids=["a", "b"]).text


@pytest.mark.parametrize(("start", "state"), [(45.0, "valid"), (75.0, "invalid"), (None, "valid")])
def test_a_hot_start_is_invalid(start: float | None, state: str) -> None:
    gate = clock_gate(STEADY, start_temperature_c=start, temperature_window_c=(20, 60))
    assert gate.state == state


def test_arms_with_different_clocks_cannot_be_compared() -> None:
    first = clock_gate(STEADY)
    assert arms_gate(first, clock_gate(STEADY * 1.005)).state == "valid"
    assert arms_gate(first, clock_gate(STEADY * 1.02)).state == "invalid"
    assert arms_gate(first, clock_gate(STEADY * 0.98)).state == "invalid"
    assert arms_gate(first, clock_gate([])).state == "unknown"
    assert "needed" in arms_gate(first, clock_gate(STEADY[:5])).text
