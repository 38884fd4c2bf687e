"""Where the time of a decode step goes, op by op."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..profiles import by_kind
from ..race import seconds_per_token
from ..ratios import of_rounds
from ..results import Row, judged

SUMMARY = "where the time of a step goes, by op"
TOKENS = 24


def run(bench: Bench) -> Iterator[Row]:
    for name, depths in (("135m-q4_1", (0, 4096)), ("1b-q4_0", (0,))):
        if bench.quick and name.startswith("1b"):
            continue
        model = bench.model(name)
        configurations = {"ours": (bench.package(model), bench.options())}
        context = min(model.context, max(depths) + 64)
        with bench.contestants(configurations, context, traced=["ours"]) as found:
            runner = found["ours"]
            checks = bench.checks(model, [runner])
            for depth in (min(depth, context - 64) for depth in depths):
                runner.fill(model.tokens[:depth])
                tokens = model.tokens[depth : depth + TOKENS]
                ops, traced, whole = [], [], []
                for _ in range(bench.rounds):
                    ops = runner.profile(tokens)
                    traced.append(sum(float(item["seconds"]) for item in ops))
                    whole.append(seconds_per_token(runner.phase(tokens)))
                groups = by_kind(ops)
                most = "; ".join(f"{item['ops']} {item['share']:.0%}" for item in groups[:5])
                yield judged(
                    bench.name,
                    f"{model.name}, depth {depth}: share of a step inside ops",
                    of_rounds(traced, whole),
                    unit="%",
                    checks=checks,
                    speeds=most,
                    evidence={"profile": groups, "ops": ops},
                )
