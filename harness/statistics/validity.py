"""May a timing be judged at all? The gate before every verdict about speed."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

MIN_SAMPLES = 30
MAX_SPREAD = 0.05
MAX_OFFSET = 0.01  # of one arm's clock against the other's
START_WINDOW_C = 5.0  # between the starts of two runs that are compared

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


@dataclasses.dataclass(frozen=True)
class Start:
    """How a board was when a run began. None: it did not say."""

    boot_id: str | None
    temperature_c: float | None


def pair_gate(a: Start, b: Start) -> Validity:
    """Judges whether two runs began alike: in one boot, and within 5 °C of each other.

    A board that restarted between them, or that one of them found hot, gives no pair.
    """
    if a.boot_id is not None and b.boot_id is not None and a.boot_id != b.boot_id:
        return Validity(INVALID, "the board was restarted between the two")
    if a.temperature_c is None or b.temperature_c is None:
        return Validity(UNKNOWN, "the board shows no temperature")
    apart = abs(a.temperature_c - b.temperature_c)
    told = f"began at {a.temperature_c:.0f} °C and {b.temperature_c:.0f} °C"
    if apart > START_WINDOW_C:
        return Validity(INVALID, f"{told}, at most {START_WINDOW_C:.0f} °C apart may be compared")
    return Validity(VALID, told)


def arms_gate(a_mhz: npt.ArrayLike, b_mhz: npt.ArrayLike) -> Validity:
    """Judges the busy clocks of all runs of A (N,) and of B (M,): each by `clock_gate`, and their
    medians within 1 % of each other. `median_mhz` is that of A.

    Interleaved runs share what the board does on its own; clocks that differ by arm are a cause of
    their own, and no verdict about the engine may rest on them.
    """
    gates = {"A": clock_gate(a_mhz), "B": clock_gate(b_mhz)}
    for letter, gate in gates.items():
        if gate.state == INVALID:
            return dataclasses.replace(gate, reason=f"{letter}: {gate.reason}")
    if any(gate.state == UNKNOWN for gate in gates.values()):
        return next(gate for gate in gates.values() if gate.state == UNKNOWN)
    middle_a, middle_b = (float(gate.median_mhz or 0.0) for gate in gates.values())
    offset = middle_b / middle_a - 1
    samples = sum(gate.samples for gate in gates.values())
    spread = max(float(gate.spread or 0.0) for gate in gates.values())
    told = f"A ran at {middle_a:.0f} MHz, B at {middle_b:.0f} MHz ({offset:+.1%})"
    if abs(offset) > MAX_OFFSET:
        reason = f"{told}, at most {MAX_OFFSET:.0%} apart may be compared"
        return Validity(INVALID, reason, samples, spread, middle_a)
    return Validity(VALID, told, samples, spread, middle_a)
