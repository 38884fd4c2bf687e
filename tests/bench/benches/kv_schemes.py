"""Decode deep in the context with a cache of fewer bits."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..results import Row
from ..variants import Pair, compared

SUMMARY = "KV cache f16, int8 and int4: decode at 4k positions"
DEPTH = 4096
TOKENS = 24
OTHERS = ("int8", "int4")


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    package = bench.package(model)
    configurations = {kind: (package, bench.options(kv=kind)) for kind in ("f16", *OTHERS)}
    pairs = [Pair("f16", kind, f"cache {kind} against f16, deep in the context") for kind in OTHERS]
    yield from compared(bench, model, configurations, pairs, count=TOKENS, depth=DEPTH)
