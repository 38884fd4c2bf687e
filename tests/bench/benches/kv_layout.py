"""Attention time with each layout of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import CHECKED, Bench
from ..profiles import attention_seconds
from ..race import Phase, race
from ..results import Row, Target, judged
from ..runners import EngineRunner

SUMMARY = "KV layouts sd, ds and mixed: attention time at 4k positions"
TARGET = Target(1.15)
DEPTH = 4096
TOKENS = 16
LAYOUTS = ("sd", "ds", "mixed")
SCHEMES = {"f16": TARGET, "int8": None, "int4": None}  # the target is that of the default cache


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    package = bench.package(model)
    depth = min(DEPTH, model.context - CHECKED - TOKENS)
    for scheme, target in SCHEMES.items():
        if bench.quick and target is None:
            continue
        configurations = {
            layout: (package, bench.options(kv=scheme, kv_layout=layout)) for layout in LAYOUTS
        }
        bench.log(f"{model.name}: {scheme} cache in layouts {', '.join(LAYOUTS)}")
        with bench.contestants(configurations, depth + CHECKED + TOKENS, traced=LAYOUTS) as found:
            checks = bench.checks(model, list(found.values()))
            for runner in found.values():
                runner.fill(model.tokens[:depth])
            tokens = model.tokens[depth : depth + TOKENS]
            times = race(
                {layout: attention_phase(runner, tokens) for layout, runner in found.items()},
                bench.rounds,
                [runner.worker.pid for runner in found.values()],
            )
        better, worse = times.best(LAYOUTS), max(LAYOUTS, key=times.median)
        yield judged(
            bench.name,
            f"{model.name}: {scheme} cache at {depth}, attention in {better} against {worse}",
            times.ratio(worse, better),
            target=target,
            checks=checks,
            speeds=f"{1e3 * times.median(better):.2f} and {1e3 * times.median(worse):.2f} ms "
            "a token",
            notes=times.notes,
            evidence=times.evidence,
        )


def attention_phase(runner: EngineRunner, tokens: tuple[int, ...]) -> Phase:
    return lambda: attention_seconds(runner.profile(tokens))
