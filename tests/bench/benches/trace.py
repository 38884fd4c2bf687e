"""What the trace costs."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..results import Row, Target
from ..variants import Pair, compared

SUMMARY = "trace on against off"
TARGET = Target(1.01, at_least=False)
TOKENS = 48
LAUNCHES = 4  # one percent is less than what the place of the memory makes


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    same = (bench.package(model), bench.options())
    pairs = [Pair("trace on", "trace off", "time with the trace on against off", TARGET)]
    configurations = {"trace off": same, "trace on": same}
    yield from compared(
        bench, model, configurations, pairs, count=TOKENS, traced=["trace on"], launches=LAUNCHES
    )
