"""Fewer bits of the weights, where bandwidth binds; the faster kind of 4 bits is judged."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import CHECKED, Bench
from ..decoding import decode_phase, explained
from ..race import golden, race
from ..results import Row, Target, judged

SUMMARY = "W4A16 and W4A8 against W8A8 on the 1B shape"
TARGET = Target(1.3)
TOKENS = 10
BASE = "W8A8"
JUDGED = ("W4A8", "W4A16")
# name → model, activations
KINDS = {
    BASE: ("1b-q8_0", "int8"),
    "W4A8": ("1b-q4_0", "int8"),
    "W4A16": ("1b-q4_0", "float"),
    "W8A16": ("1b-q8_0", "float"),
}


def run(bench: Bench) -> Iterator[Row]:
    models = {kind: bench.model(name) for kind, (name, _) in KINDS.items()}
    configurations = {
        kind: (bench.package(models[kind]), bench.options(activations=activations))
        for kind, (_, activations) in KINDS.items()
    }
    with bench.contestants(configurations, CHECKED + TOKENS) as found:
        checks = {}
        for kind, runner in found.items():
            reference = bench.reference(models[kind], 0)
            checks[kind] = golden([runner], reference, models[kind].tokens[:CHECKED])[0]
        times = race(
            {
                kind: decode_phase(runner, models[kind].tokens[:TOKENS])
                for kind, runner in found.items()
            },
            bench.rounds,
            [runner.worker.pid for runner in found.values()],
        )
    better = times.best(JUDGED)
    for kind in KINDS:
        if kind == BASE:
            continue
        ratio, target = times.ratio(BASE, kind), TARGET if kind == better else None
        yield judged(
            bench.name,
            f"1B shape: {kind} against {BASE}",
            ratio,
            target=target,
            checks=[checks[kind], checks[BASE]],
            speeds=f"{1 / times.median(kind):.1f} and {1 / times.median(BASE):.1f} tok/s",
            notes=times.notes,
            evidence={
                **times.evidence,
                **explained(bench, models[kind], found[kind], ratio, target),
            },
        )
