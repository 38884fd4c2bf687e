"""The verdict on pairs: the gate first, then each metric, then one word for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.statistics.pairs import (
    BETTER,
    EQUIVALENT,
    MOST_PAIRS,
    UNKNOWN,
    WORSE,
    Comparison,
    compare,
)
from harness.statistics.validity import INVALID, Start, Validity, arms_gate, pair_gate

ORDER = (INVALID, WORSE, UNKNOWN, BETTER, EQUIVALENT)  # of words for all metrics, the worst first
GOOD = (BETTER, EQUIVALENT)


@dataclasses.dataclass(frozen=True)
class Metric:
    """Smaller is better, of all of them."""

    name: str
    words: str
    unit: str
    scale: float = 1.0  # from what is stored to the unit


METRICS = {
    one.name: one
    for one in (
        Metric("tpot_s", "time per token", "ms", 1e3),
        Metric("ttft_s", "time to the first token", "ms", 1e3),
        Metric("rss_mb", "peak memory", "MiB"),
    )
}


UNTOLD = Start(None, None)


@dataclasses.dataclass(frozen=True)
class Visit:
    """One fresh process on the board. `metrics`: name → value; `clocks_mhz` of its busy samples."""

    metrics: Mapping[str, float]
    start: Start = UNTOLD
    clocks_mhz: tuple[float, ...] = ()
    seconds: float = 0.0
    run: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "metrics": dict(self.metrics),
            "boot": self.start.boot_id,
            "start_c": self.start.temperature_c,
            "clocks_mhz": [round(value) for value in self.clocks_mhz],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], seconds: float, run: str) -> Visit:
        return cls(
            {str(name): float(value) for name, value in found["metrics"].items()},
            Start(found.get("boot"), found.get("start_c")),
            tuple(float(value) for value in found.get("clocks_mhz") or ()),
            seconds,
            run,
        )


@dataclasses.dataclass(frozen=True)
class Pair:
    a: Visit
    b: Visit

    @property
    def gate(self) -> Validity:
        return pair_gate(self.a.start, self.b.start)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """`verdict` is of B, over the metrics that decide; `more` pairs may settle it. `clocks` is what
    the gate said."""

    verdict: str
    metrics: Mapping[str, Comparison]
    clocks: Validity
    more: int
    reason: str = ""  # of an invalid one

    @property
    def good(self) -> bool:
        return self.verdict in GOOD


def judge(pairs: Sequence[Pair], deciding: Sequence[str], *, virtual: bool = False) -> Judgement:
    """Judges at most 20 pairs, those that began alike. A virtual board's clocks are its host's."""
    usable = [pair for pair in pairs if pair.gate.state != INVALID][:MOST_PAIRS]
    found = {name: _compared(usable, name) for name in METRICS}
    known = {name: one for name, one in found.items() if one is not None}
    clocks = (
        Validity("unknown", "a virtual board shares the processor of its host")
        if virtual
        else arms_gate(_clocks(pair.a for pair in usable), _clocks(pair.b for pair in usable))
    )
    asked = [known[name] for name in deciding if name in known]
    more = max((one.more for one in asked), default=0)
    missing = [METRICS[name].words for name in deciding if name not in known]
    if clocks.state == INVALID:
        return Judgement(INVALID, known, clocks, 0, clocks.reason)
    if missing:
        return Judgement(INVALID, known, clocks, 0, f"not told by every run: {', '.join(missing)}")
    verdicts = {one.verdict for one in asked}
    return Judgement(next(word for word in ORDER if word in verdicts), known, clocks, more)


def _compared(pairs: Sequence[Pair], name: str) -> Comparison | None:
    """None where a pair lacks the metric."""
    both = [(pair.a.metrics.get(name), pair.b.metrics.get(name)) for pair in pairs]
    values = [(a, b) for a, b in both if a and b]
    if len(values) < len(both) or not values:
        return None
    return compare([a for a, _ in values], [b for _, b in values])


def _clocks(visits: Any) -> list[float]:
    return [value for visit in visits for value in visit.clocks_mhz]


def scatter(pairs: Sequence[Pair], name: str) -> list[float]:
    """Log ratios of pairs without what they have in common: what equal versions would differ by."""
    logs = [
        float(np.log(b / a))
        for a, b in ((p.a.metrics.get(name), p.b.metrics.get(name)) for p in pairs)
        if a and b
    ]
    middle = float(np.median(logs)) if logs else 0.0
    return [value - middle for value in logs]


def words(judgement: Judgement, name: str) -> str:
    """One metric in one line."""
    one, metric = judgement.metrics.get(name), METRICS[name]
    if one is None:
        return f"{metric.words}: not told"
    return f"{metric.words}: {one.sentence}"


__all__ = [
    "GOOD", "METRICS", "UNKNOWN", "Judgement", "Metric", "Pair", "Visit", "judge", "scatter",
    "words",
]  # fmt: skip
