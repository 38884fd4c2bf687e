"""The first token of a new process, with the warm-up pass before it and without."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..models import Model
from ..race import race
from ..results import Check, Row, judged
from ..runners import EngineRunner

SUMMARY = "first token of a new process after the warm-up, against without"
PROMPT = 16


def run(bench: Bench) -> Iterator[Row]:
    for name in ("135m-q4_1", "1b-q4_0"):
        if not (bench.quick and name.startswith("1b")):
            yield _row(bench, bench.model(name))


def _row(bench: Bench, model: Model) -> Row:
    package = bench.package(model)
    checks: list[Check] = []

    def first_token(warm: bool) -> float:
        with bench.engine_worker("warm-up") as worker:
            runner = EngineRunner("ours", worker, package, bench.options(), model.context)
            if warm:
                runner.warm_up()
            seconds = runner.prefill(model.tokens[:PROMPT])
            if not checks:
                checks.extend(bench.checks(model, [runner]))
            return seconds

    phases = {"cold": lambda: first_token(False), "warm": lambda: first_token(True)}
    times = race(phases, bench.rounds, [])
    return judged(
        bench.name,
        f"{model.name}: first token of {PROMPT}, without warm-up against after it",
        times.ratio("cold", "warm"),
        checks=checks,
        speeds=f"{1e3 * times.median('cold'):.1f} → {1e3 * times.median('warm'):.1f} ms",
        notes=("the file is in the page cache in both", *times.notes),
        evidence=times.evidence,
    )
