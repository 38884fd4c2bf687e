"""Eight sequences of mixed lengths in one batch: attention in buckets, against padding to the
longest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

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


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    scale = min(1.0, model.context / 8192)
    lengths = [max(8, int(length * scale)) for length in LENGTHS]
    steps = STEPS * (bench.rounds + 1)  # one phase goes ahead uncounted
    context = max(lengths) + steps + 1
    prompts = [list(model.tokens[:length]) for length in lengths]
    package = bench.package(model)
    batches: dict[str, Batch] = {}
    with ExitStack() as stack:
        for name, spread in (("buckets", BUCKET_SPREAD), ("padded", PADDED)):
            worker = stack.enter_context(bench.engine_worker(name))
            worker.ask(
                "open_batch",
                session=name,
                package=str(package),
                options=bench.options(),
                context=context,
                prompts=prompts,
                buckets=spread,
                steps=steps,
            )
            batches[name] = Batch(name, worker)
        phases = {name: batch.phase for name, batch in batches.items()}
        times = race(phases, bench.rounds, [batch.worker.pid for batch in batches.values()])
    checks = _checks(bench, package, prompts, context, batches)
    # The steps of one race give both costs.
    whole = {name: tuple(batch.steps[1:]) for name, batch in batches.items()}
    for what, costs, target in (("attention", times.costs, TARGET), ("whole step", whole, None)):
        part = dataclasses.replace(times, costs=costs)
        ms = [1e3 * part.median(name) for name in ("padded", "buckets")]
        yield judged(
            bench.name,
            f"{model.name}: batch of {len(lengths)}, {what} in buckets against padded",
            part.ratio("padded", "buckets"),
            target=target,
            checks=checks,
            speeds=f"{ms[0]:.2f} → {ms[1]:.2f} ms a step",
            notes=(f"lengths {', '.join(map(str, lengths))}", *part.notes),
            evidence=part.evidence,
        )


class Batch:
    """One way to run the batch: its worker, the tokens so far, and seconds of whole steps."""

    def __init__(self, name: str, worker: Worker) -> None:
        self.name, self.worker = name, worker
        self.steps: list[float] = []
        self.tokens: list[list[int]] = []

    def phase(self) -> float:
        """Seconds of a step's attention, the median of some steps."""
        told = self.worker.ask("step_batch", session=self.name, steps=STEPS)
        self.steps.append(float(np.median(told["seconds"])))
        self.tokens = told["tokens"]
        return float(np.median(told["attention"]))


def _checks(
    bench: Bench,
    package: Path,
    prompts: list[list[int]],
    context: int,
    batches: dict[str, Batch],
) -> list[Check]:
    """Every sequence of both batches against the same sequence alone."""
    with bench.engine_worker("alone") as worker:
        alone = EngineRunner("alone", worker, package, bench.options(), context)
        expected = [alone.greedy(prompt, STEPS) for prompt in prompts]
    found = []
    for name, batch in batches.items():
        pairs = [
            (a, b)
            for wanted, tokens in zip(expected, batch.tokens, strict=True)
            for a, b in zip(wanted, tokens[:STEPS], strict=True)
        ]
        share = sum(a == b for a, b in pairs) / len(pairs)
        failure = "" if share >= SAME else "its tokens differ from those of each sequence alone"
        found.append(Check(name, len(pairs), len(pairs), share, 0.0, failure))
    return found
