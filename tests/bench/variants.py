"""Our engine against itself: one thing changed, everything else the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .context import CHECKED, Bench
from .decoding import decode_phase, explained
from .models import Model
from .race import Race, race
from .results import Check, Row, Target, judged
from .runners import EngineRunner

LAUNCHES = 2
Configurations = Mapping[str, tuple[Path, Mapping[str, Any]]]  # name → package, options


@dataclasses.dataclass(frozen=True)
class Pair:
    """How many times the time of `fast` is the time of `slow`."""

    slow: str
    fast: str
    name: str
    target: Target | None = None


def compared(
    bench: Bench,
    model: Model,
    configurations: Configurations,
    pairs: Sequence[Pair],
    *,
    count: int,
    depth: int = 0,
    traced: Sequence[str] = (),
    launches: int = LAUNCHES,
) -> Iterator[Row]:
    """Decode speed of every configuration, behind `depth` cached positions, `count` tokens a phase;
    a row for each pair. Those in `traced` record a trace meanwhile.

    One race for each of `launches`: where memory happens to lie differs from process to process by
    a percent and more, and no turns within them average that.
    """
    depth = min(depth, model.context - CHECKED - count)
    tokens = model.tokens[depth : depth + count]
    bench.log(f"{model.name}: {', '.join(configurations)}")
    times: Race | None = None
    checks: dict[str, Check] = {}
    found: dict[str, EngineRunner] = {}
    for launch in range(1 if bench.quick else launches):
        with bench.contestants(configurations, depth + CHECKED + count, traced=traced) as opened:
            found, runners = opened, list(opened.values())
            if not launch:
                # At the start of the text, where the reference costs nothing; then all go deep.
                checks = dict(zip(found, bench.checks(model, runners), strict=True))
            for runner in runners:
                runner.fill(model.tokens[:depth])
            phases = {name: decode_phase(runner, tokens) for name, runner in found.items()}
            one = race(phases, bench.rounds, [runner.worker.pid for runner in runners])
            times = one if times is None else times + one
    if times is None:
        return
    for pair in pairs:
        ratio = times.ratio(pair.slow, pair.fast)
        speeds = [1 / times.median(name) for name in (pair.slow, pair.fast)]
        yield judged(
            bench.name,
            f"{model.name}: {pair.name}",
            ratio,
            target=pair.target,
            checks=[checks[pair.slow], checks[pair.fast]],
            speeds=f"{speeds[0]:.1f} → {speeds[1]:.1f} tok/s",
            notes=times.notes,
            evidence={
                **times.evidence,
                "options": {name: found[name].options for name in (pair.slow, pair.fast)},
                # Only the record of the runner is used: its worker has ended.
                **explained(bench, model, found[pair.fast], ratio, pair.target),
            },
        )
