"""Prefill of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from ..context import CHECKED, Bench
from ..opponents import Opponents
from ..profiles import by_kind
from ..race import Phase, golden, race
from ..results import SKIPPED, Row, Target, judged
from ..runners import EngineRunner, Runner

SUMMARY = "prefill of 512 tokens against llama.cpp"
TARGETS = {"135m-q4_1": Target(1.5), "1b-q4_0": None}
TOKENS = 512
OURS = "ours"


def run(bench: Bench) -> Iterator[Row]:
    for name, target in TARGETS.items():
        if not (bench.quick and target is None):
            yield from _row(bench, name, target)


def _row(bench: Bench, name: str, target: Target | None) -> Iterator[Row]:
    model = bench.model(name)
    tokens = model.tokens[:TOKENS]
    label = f"{model.name}, {TOKENS} tokens, against llama.cpp"
    if bench.no_llama:
        yield Row(bench.name, label, SKIPPED, notes=(bench.no_llama,))
        return
    with ExitStack() as stack:
        worker = stack.enter_context(bench.engine_worker())
        ours = EngineRunner(OURS, worker, bench.package(model), bench.options(), TOKENS)
        against = Opponents(bench, model, TOKENS, stack)
        rivals = against.finalists(tokens, against.batching, prefill=True)
        reference = bench.reference(model, 0)
        checks = golden([ours, *rivals], reference, tokens[:CHECKED], "prefill")
        phases = {item.name: _phase(item, tokens) for item in (ours, *rivals)}
        found = race(phases, bench.rounds, [item.worker.pid for item in (ours, *rivals)])
        fastest = found.best([rival.name for rival in rivals])
        yield judged(
            bench.name,
            label,
            found.ratio(fastest, OURS),
            target=target,
            checks=checks,
            speeds=f"{TOKENS / found.median(OURS):.0f} and {TOKENS / found.median(fastest):.0f} "
            "tok/s",
            notes=(fastest, *against.notes, *found.notes),
            evidence={
                **found.evidence,
                "options": ours.options,
                "profile": _profile(bench, ours, tokens),
            },
        )


def _profile(bench: Bench, ours: EngineRunner, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    with bench.engine_worker("profile") as worker:
        return by_kind(ours.twin(worker, trace=True).profile(tokens, "prefill"))


def _phase(runner: Runner, tokens: tuple[int, ...]) -> Phase:
    return lambda: runner.prefill(tokens)
