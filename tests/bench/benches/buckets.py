"""Eight sequences of mixed lengths in one batch: attention in buckets, against padding to the
longest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.batching import BUCKET_SPREAD

from ..context import Bench
from ..protocol import Worker
from ..race import race
from ..results import Check, Row, Target, judged
from ..runners import EngineRunner

SUMMARY = "length buckets, batch of 8 with mixed lengths: attention time"
TARGET = Target(1.2)
LENGTHS = (60, 90, 150, 260, 440, 760, 1300, 2000)
STEPS = 6
PADDED = 0.0
SAME = 0.9  # share of tokens that must be those of each sequence alone; near ties may differ
_numbers = itertools.count(1)


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    scale = min(1.0, model.context / 8192)
    lengths = [max(8, int(length * scale)) for length in LENGTHS]
    # One phase goes ahead uncounted.
    steps = STEPS * (bench.rounds + 1)
    context = max(lengths) + steps + 1
    prompts = [list(model.tokens[:length]) for length in lengths]
    package = str(bench.package(model))
    told: dict[str, dict[str, Any]] = {}

    def phase(name: str, worker: Worker, session: str, part: str) -> Callable[[], float]:
        def measure() -> float:
            told[name] = worker.ask("step_batch", session=session, steps=STEPS)
            values = sorted(told[name][part])
            return float(values[len(values) // 2])

        return measure

    for part, target in (("attention", TARGET), ("seconds", None)):
        with bench.engine_worker("buckets") as first, bench.engine_worker("padded") as second:
            phases = {}
            for name, worker, spread in (
                ("buckets", first, BUCKET_SPREAD),
                ("padded", second, PADDED),
            ):
                session = f"b{next(_numbers)}"
                worker.ask(
                    "open_batch",
                    session=session,
                    package=package,
                    options=bench.options(),
                    context=context,
                    prompts=prompts,
                    buckets=spread,
                    steps=steps,
                )
                phases[name] = phase(name, worker, session, part)
            times = race(phases, bench.rounds, [first.pid, second.pid])
        checks = _checks(bench, package, prompts, context, told)
        what = "attention" if part == "attention" else "whole step"
        yield judged(
            bench.name,
            f"{model.name}: batch of {len(lengths)}, {what} in buckets against padded",
            times.ratio("padded", "buckets"),
            target=target,
            checks=checks,
            speeds=f"{1e3 * times.median('buckets'):.2f} and {1e3 * times.median('padded'):.2f} ms "
            "a step",
            notes=(f"lengths {', '.join(map(str, lengths))}", *times.notes),
            evidence=times.evidence,
        )


def _checks(
    bench: Bench,
    package: str,
    prompts: list[list[int]],
    context: int,
    told: dict[str, dict[str, Any]],
) -> list[Check]:
    """Every sequence of both batches against the same sequence alone."""
    with bench.engine_worker("alone") as worker:
        alone = EngineRunner("alone", worker, Path(package), bench.options(), context)
        expected = [alone.greedy(prompt, STEPS) for prompt in prompts]
    found = []
    for name, answer in told.items():
        pairs = [
            (a, b)
            for wanted, tokens in zip(expected, answer["tokens"], strict=True)
            for a, b in zip(wanted, tokens[:STEPS], strict=True)
        ]
        share = sum(a == b for a, b in pairs) / len(pairs)
        failure = "" if share >= SAME else "its tokens differ from those of each sequence alone"
        found.append(Check(name, len(pairs), len(pairs), share, 0.0, failure))
    return found
