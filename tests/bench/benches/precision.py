"""Fewer bits of the weights, where bandwidth binds."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import CHECKED, Bench
from ..decoding import decode_phase
from ..race import golden, race
from ..results import Row, Target, judged

SUMMARY = "W4A16 and W4A8 against W8A8 on the 1B shape"
TARGET = Target(1.3)
TOKENS = 10
BASE = "W8A8"
# name → model, activations, target
KINDS = {
    BASE: ("1b-q8_0", "int8", None),
    "W4A8": ("1b-q4_0", "int8", TARGET),
    "W4A16": ("1b-q4_0", "float", TARGET),
    "W8A16": ("1b-q8_0", "float", None),
}


def run(bench: Bench) -> Iterator[Row]:
    models = {kind: bench.model(name) for kind, (name, _, _) in KINDS.items()}
    configurations = {
        kind: (bench.package(models[kind]), bench.options(activations=activations))
        for kind, (_, activations, _) in KINDS.items()
    }
    with bench.contestants(configurations, CHECKED + TOKENS) as found:
        checks = {
            kind: golden([runner], bench.reference(models[kind], 0), models[kind].tokens[:CHECKED])[
                0
            ]
            for kind, runner in found.items()
        }
        times = race(
            {
                kind: decode_phase(runner, models[kind].tokens[:TOKENS])
                for kind, runner in found.items()
            },
            bench.rounds,
            [runner.worker.pid for runner in found.values()],
        )
        for kind, (_, _, target) in KINDS.items():
            if kind == BASE:
                continue
            yield judged(
                bench.name,
                f"1B shape: {kind} against {BASE}",
                times.ratio(BASE, kind),
                target=target,
                checks=[checks[kind], checks[BASE]],
                speeds=f"{1 / times.median(kind):.1f} and {1 / times.median(BASE):.1f} tok/s",
                notes=times.notes,
                evidence=times.evidence,
            )
