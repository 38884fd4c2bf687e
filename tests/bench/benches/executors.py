"""One program, three executors."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..results import Row
from ..variants import Pair, compared

SUMMARY = "executors: compiled against sync and async"
TOKENS = 24
OTHERS = ("sync", "async")


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    package = bench.package(model)
    configurations = {
        name: (package, bench.options(executor=name)) for name in ("compiled", *OTHERS)
    }
    pairs = [Pair(name, "compiled", f"executor compiled against {name}") for name in OTHERS]
    yield from compared(bench, model, configurations, pairs, count=TOKENS)
