"""May a timing be judged? Clocks and heat during a run, and what they say about it.

At least 30 samples of a busy engine, clocks within 5 %, no downward trend; else the timing is
invalid. A board that shows no clocks says so, and its verdict carries "clocks unknown".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.statistics.throttle import BUSY_PERCENT, THROTTLED
from harness.statistics.validity import INVALID, MIN_SAMPLES, clock_gate
from harness.verdicts import Check, Outcome

if TYPE_CHECKING:
    from harness.jobs.base import StageContext
    from harness.jobs.runlog import RunLog


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Samples of a run on the run's own clock. Arrays (n,), NaN where a board tells nothing."""

    t_s: npt.NDArray[np.float64]  # since the run began
    clock_mhz: npt.NDArray[np.float64]
    temperature_c: npt.NDArray[np.float64]
    busy: npt.NDArray[np.bool_]

    def at(self, t_s: float) -> tuple[float | None, float | None]:
        """(clock, temperature) of the sample nearest in time."""
        if not len(self.t_s):
            return None, None
        index = int(np.argmin(np.abs(self.t_s - t_s)))
        return _known(self.clock_mhz[index]), _known(self.temperature_c[index])


@dataclasses.dataclass(frozen=True)
class Validity:
    """`state` is valid, unknown or invalid; `text` goes into the details."""

    state: str
    text: str
    sentence: str

    @property
    def check(self) -> Check:
        outcome = Outcome.INVALID if self.state == INVALID else Outcome.PASS
        return Check(
            name="clocks", outcome=outcome, measured=self.text, limit=None, sentence=self.sentence
        )


def run_start_ns(log: RunLog) -> int:
    return log.events[0].t_ns if log.events else 0


def conditions(log: RunLog) -> Conditions:
    start_ns = run_start_ns(log)
    cpus = next((e.data.get("cpus") for e in log.of_kind("ready") if e.data.get("cpus")), None)
    rows = [
        (
            (float(sample["t_ns"]) - start_ns) / 1e9,
            clock_of(sample, cpus),
            hottest(sample),
            float(sample.get("cpu_percent") or 0.0) >= BUSY_PERCENT,
        )
        for sample in log.samples
    ]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    t_s, clock, heat = (np.array(column, np.float64) for column in columns[:3])
    return Conditions(t_s, clock, heat, np.array(columns[3], np.bool_))


def clock_of(sample: Mapping[str, Any], cpus: list[int] | None) -> float:
    """MHz of the fastest core that the engine may use: the busy one is it. NaN when unknown."""
    clocks = sample.get("clocks_mhz") or []
    allowed = [clocks[cpu] for cpu in cpus or () if cpu < len(clocks)] or clocks
    known = [float(value) for value in allowed if value]
    return max(known) if known else float("nan")


def hottest(sample: Mapping[str, Any]) -> float:
    """°C of the hottest zone, NaN when unknown."""
    zones = [float(value) for value in (sample.get("temperatures") or {}).values()]
    return max(zones) if zones else float("nan")


def judge_clocks(context: StageContext, found: Conditions) -> Validity:
    """The validity gate of one run."""
    if context.board.virtual is not None:
        return Validity(
            "unknown",
            "unknown: a virtual board shares its host",
            "Clocks unknown: a virtual board shares the processor of its host with other work.",
        )
    clocks = found.clock_mhz[found.busy & np.isfinite(found.clock_mhz)]
    gate = clock_gate(clocks if len(clocks) else found.clock_mhz)
    heat = found.temperature_c[np.isfinite(found.temperature_c)]
    hot = f" at up to {heat.max():.0f} °C" if len(heat) else ""
    part = max(1, len(clocks) // 3)
    early, late = (np.median(clocks[:part]), np.median(clocks[-part:])) if len(clocks) else (0, 0)
    if gate.state == INVALID and len(clocks) >= MIN_SAMPLES and late < THROTTLED * early:
        text = f"throttled: {early:.0f} to {late:.0f} MHz{hot}"
        return Validity(INVALID, text, f"The board was {text}.")
    return Validity(gate.state, gate.text, f"Clocks {gate.state}: {gate.reason}{hot}.")


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
