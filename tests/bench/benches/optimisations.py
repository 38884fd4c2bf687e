"""Everything on, against the plain path of the same library."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..results import Row, Target
from ..variants import Pair, compared

SUMMARY = "all optimisations against the plain, unfused, row-major path of the same library"
TARGET = Target(4.0)
# Op by op from Python, float activations and cache, rows as they come, ordinary pages.
PLAIN = {
    "executor": "sync",
    "activations": "float",
    "fused": False,
    "kv": "f32",
    "kv_layout": "sd",
    "huge_pages": False,
}


def run(bench: Bench) -> Iterator[Row]:
    for name, count, target in (("135m-q4_1", 16, TARGET), ("1b-q4_0", 6, None)):
        if bench.quick and target is None:
            continue
        model = bench.model(name)
        rows = bench.package(model, layout="row")
        configurations = {
            "plain": (rows, bench.options(**PLAIN)),
            "plain, compiled": (rows, bench.options(**{**PLAIN, "executor": "compiled"})),
            "all on": (bench.package(model), bench.options()),
        }
        pairs = [
            Pair("plain", "all on", "all optimisations against the plain path", target),
            Pair("plain, compiled", "all on", "the same, the plain path compiled"),
        ]
        yield from compared(bench, model, configurations, pairs, count=count)
