"""Weights in huge pages, against the mapped file."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..results import Row
from ..variants import Pair, compared

SUMMARY = "huge pages on against off"


def run(bench: Bench) -> Iterator[Row]:
    for name, count in (("135m-q4_1", 32), ("1b-q4_0", 10)):
        if bench.quick and name.startswith("1b"):
            continue
        model = bench.model(name)
        package = bench.package(model)
        configurations = {
            "off": (package, bench.options(huge_pages=False)),
            "on": (package, bench.options(huge_pages=True)),
        }
        pairs = [Pair("off", "on", "huge pages")]
        yield from compared(bench, model, configurations, pairs, count=count)
