"""What each fusion pass is worth: all on, against all but one."""

from __future__ import annotations

from collections.abc import Iterator

from engine.program.passes import pass_names

from ..context import Bench
from ..results import Row
from ..variants import Pair, compared

SUMMARY = "each fusion pass on against off"
TOKENS = 32


def run(bench: Bench) -> Iterator[Row]:
    model = bench.model("135m-q4_1")
    package = bench.package(model)
    configurations = {"all": (package, bench.options())}
    names = tuple(pass_names())
    for name in names:
        configurations[f"without {name}"] = (package, bench.options(passes_off=[name]))
    configurations["none"] = (package, bench.options(fused=False))
    pairs = [Pair(f"without {name}", "all", f"pass {name}") for name in names]
    pairs.append(Pair("none", "all", "all passes together"))
    yield from compared(bench, model, configurations, pairs, count=TOKENS)
