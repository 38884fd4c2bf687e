"""Weight layouts."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..results import Row
from ..variants import Pair, compared

SUMMARY = "weight layouts: interleaved against row and blocked"
OTHERS = ("row", "blocked")


def run(bench: Bench) -> Iterator[Row]:
    for name, count in (("135m-q4_1", 32), ("1b-q4_0", 10)):
        if bench.quick and name.startswith("1b"):
            continue
        model = bench.model(name)
        configurations = {
            layout: (bench.package(model, layout=layout), bench.options())
            for layout in ("interleaved", *OTHERS)
        }
        pairs = [
            Pair(other, "interleaved", f"layout interleaved against {other}") for other in OTHERS
        ]
        yield from compared(bench, model, configurations, pairs, count=count)
