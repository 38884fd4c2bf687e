"""The gate before every verdict about speed."""

from __future__ import annotations

import numpy as np

from harness.statistics.validity import Start, arms_gate, clock_gate, pair_gate

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


def governed(rng: np.random.Generator, mhz: float, count: int = 60) -> np.ndarray:
    """Busy clocks under a governor: small jitter, now and then a step down for a sample."""
    clocks = mhz * (1 + rng.normal(0, 0.002, count))
    clocks[rng.random(count) < 0.005] *= 0.9
    return clocks


def test_two_arms_with_the_same_clocks_are_seldom_invalid() -> None:
    rng = np.random.default_rng(2)
    states = [
        arms_gate(governed(rng, 1800), governed(rng, 1800 * (1 + rng.normal(0, 0.001)))).state
        for _ in range(500)
    ]
    assert states.count("invalid") <= 0.02 * 500  # odd readings that by chance are many


def test_an_arm_that_ran_two_percent_slower_clocks_is_no_comparison() -> None:
    rng = np.random.default_rng(3)
    gates = [arms_gate(governed(rng, 1800), governed(rng, 1764)) for _ in range(200)]
    assert sum(gate.state == "invalid" for gate in gates) >= 0.99 * 200
    assert "at most 1% apart" in gates[0].reason
    assert "B at 17" in gates[0].reason


def test_an_arm_that_throttled_is_named_and_unknown_clocks_stay_unknown() -> None:
    rng = np.random.default_rng(4)
    steady = governed(rng, 1800)
    assert arms_gate(steady, np.linspace(1800, 1500, 60)).reason.startswith("B: the clock moved")
    assert arms_gate(steady, []).state == "unknown"
    assert arms_gate([], []).state == "unknown"


def test_a_pair_needs_one_boot_and_starts_within_five_degrees() -> None:
    cool, warm, hot = (Start("boot", degrees) for degrees in (41.0, 45.5, 47.0))
    assert pair_gate(cool, warm).state == "valid"
    assert "at most 5 °C apart" in pair_gate(cool, hot).reason
    assert "restarted" in pair_gate(cool, Start("another", 41.0)).reason
    assert pair_gate(cool, Start("boot", None)).state == "unknown"
    assert pair_gate(Start(None, 40.0), cool).state == "valid"
