"""Our engine against itself: one thing changed, everything else the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .context import CHECKED, Bench
from .decoding import decode_phase
from .models import Model
from .race import race
from .results import Row, Target, judged

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
) -> Iterator[Row]:
    """Decode speed of every configuration in one race, behind `depth` cached positions, `count`
    tokens a phase; a row for each pair. Those in `traced` record a trace meanwhile."""
    depth = min(depth, model.context - CHECKED - count)
    bench.log(f"{model.name}: {', '.join(configurations)}")
    with bench.contestants(configurations, depth + CHECKED + count, traced=traced) as found:
        runners = list(found.values())
        # At the start of the text, where the reference costs nothing; then everybody goes deep.
        checks = dict(zip(found, bench.checks(model, runners), strict=True))
        for runner in runners:
            runner.fill(model.tokens[:depth])
        tokens = model.tokens[depth : depth + count]
        phases = {name: decode_phase(runner, tokens) for name, runner in found.items()}
        times = race(phases, bench.rounds, [runner.worker.pid for runner in runners])
        for pair in pairs:
            speeds = [1 / times.median(name) for name in (pair.slow, pair.fast)]
            yield judged(
                bench.name,
                f"{model.name}: {pair.name}",
                times.ratio(pair.slow, pair.fast),
                target=pair.target,
                checks=[checks[pair.slow], checks[pair.fast]],
                speeds=f"{speeds[0]:.1f} → {speeds[1]:.1f} tok/s",
                notes=times.notes,
                evidence={
                    **times.evidence,
                    "options": {name: found[name].options for name in (pair.slow, pair.fast)},
                },
            )
