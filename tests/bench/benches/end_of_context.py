"""Time per token at the end of a long context, against what its bytes predict."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import CHECKED, Bench
from ..decoding import decode_phase, explained
from ..race import golden, race
from ..ratios import of_rounds
from ..results import Row, Target, judged

SUMMARY = "TPOT at the end of an 8k context with an int8 cache, against the bytes' prediction"
TARGET = Target(1.2, at_least=False)
TOKENS = 24
START = 16


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    package = bench.package(model)
    depth = model.context - CHECKED - TOKENS
    options = bench.options(kv="int8")
    configurations = {"start": (package, options), "end": (package, options)}
    with bench.contestants(configurations, model.context) as found:
        start, end = found["start"], found["end"]
        start.fill(model.tokens[:START])
        end.fill(model.tokens[:depth])
        checks = []
        for runner in (start, end):
            reference = bench.reference(model, runner.depth)
            tokens = model.tokens[runner.depth : runner.depth + CHECKED]
            checks += golden([runner], reference, tokens)
        phases = {
            name: decode_phase(runner, model.tokens[runner.depth : runner.depth + TOKENS])
            for name, runner in found.items()
        }
        times = race(phases, bench.rounds, [runner.worker.pid for runner in found.values()])
        bytes_of = {
            name: runner.bytes_per_token(runner.depth + TOKENS / 2)
            for name, runner in found.items()
        }
        predicted = bytes_of["end"] / bytes_of["start"]
        ratio = of_rounds(times.costs["end"], times.costs["start"], factor=1 / predicted)
        evidence = {**times.evidence, "bytes": bytes_of, "options": end.options}
        evidence.update(explained(bench, model, end, ratio, TARGET))
        yield judged(
            bench.name,
            f"{model.name}: TPOT at {depth} ÷ TPOT at {START}, ÷ the ratio of their bytes",
            ratio,
            target=TARGET,
            checks=checks,
            speeds=f"{1e3 * times.median('start'):.2f} → {1e3 * times.median('end'):.2f} ms; "
            f"bytes × {predicted:.2f}",
            notes=times.notes,
            evidence=evidence,
        )
