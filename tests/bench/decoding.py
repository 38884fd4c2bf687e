"""Decode speed at several depths, against llama.cpp and against what memory gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from .context import CHECKED, Bench
from .machine import last_level_cache
from .models import Model
from .opponents import Opponents
from .profiles import by_kind
from .race import Phase, Race, golden, race, seconds_per_token
from .ratios import Ratio, of_rounds
from .reading import PLAIN, Read, best_read, beyond_caches, seconds_per_byte
from .results import SKIPPED, Check, Row, Target, judged
from .runners import EngineRunner, LlamaRunner, Runner

OURS, LINEAR, BEST = "ours", "linear read", "best read"
SHARES = {LINEAR: Target(0.95), BEST: Target(0.82, aim=0.9)}
QUICK_DEPTH = 2048
PROFILED_TOKENS = 16


def decode_phase(runner: Runner, tokens: Sequence[int]) -> Phase:
    return lambda: seconds_per_token(runner.phase(tokens))


def against_llama(
    bench: Bench, name: str, targets: Mapping[int, Target], *, count: int, judge_shares: bool
) -> Iterator[Row]:
    """Rows of one model at the depths of `targets`; `count` tokens a phase.

    Each depth is one race of ours, llama.cpp's fastest settings, and two ways to read memory.
    `judge_shares`: whether the shares of the bandwidth have a target, at the first depth.
    """
    model = bench.model(name)
    last = min(model.context - CHECKED - count, QUICK_DEPTH if bench.quick else model.context)
    depths = [depth for depth in sorted(targets) if depth <= last]
    context = depths[-1] + CHECKED + count
    with ExitStack() as stack:
        worker = stack.enter_context(bench.engine_worker())
        ours = EngineRunner(OURS, worker, bench.package(model), bench.options(), context)
        against = None
        if not bench.no_llama:
            bench.log(f"{model.name}: opening every setting of llama.cpp")
            against = Opponents(bench, model, context, stack)
        in_cache = not judge_shares and ours.weight_bytes <= last_level_cache()
        size = ours.weight_bytes if in_cache else beyond_caches()
        reads = {LINEAR: PLAIN, BEST: best_read(worker, bench.threads, size, quick=bench.quick)}
        for depth in depths:
            bench.log(f"{model.name}: depth {depth}")
            tokens = model.tokens[depth : depth + count]
            ours.fill(model.tokens[:depth])
            rivals: list[LlamaRunner] = []
            if against is not None:
                against.fill(model.tokens[:depth])
                rivals = against.finalists(tokens)
            checked = model.tokens[depth : depth + CHECKED]
            checks = golden([ours, *rivals], bench.reference(model, depth), checked)
            phases = {item.name: decode_phase(item, tokens) for item in (ours, *rivals)}
            for kind, read in reads.items():
                phases[kind] = seconds_per_byte(worker, bench.threads, size, read)
            found = race(phases, bench.rounds, [item.worker.pid for item in (ours, *rivals)])
            label = f"{model.name}, depth {depth}"
            if against is None:
                title = f"{label}, against llama.cpp"
                yield Row(bench.name, title, SKIPPED, notes=(bench.no_llama,))
            else:
                yield _ratio(bench, model, label, found, ours, rivals, targets[depth], checks)
            judge = judge_shares and depth == depths[0]
            middle = ours.bytes_per_token(depth + count / 2)
            yield from _shares(bench, label, found, middle, size, reads, checks[:1], judge)
        for note in against.notes if against is not None else ():
            bench.log(note)


def _ratio(
    bench: Bench,
    model: Model,
    label: str,
    found: Race,
    ours: EngineRunner,
    rivals: Sequence[LlamaRunner],
    target: Target,
    checks: Sequence[Check],
) -> Row:
    fastest = found.best([rival.name for rival in rivals])
    ratio = found.ratio(fastest, OURS)
    more = explained(bench, model, ours, ratio, target)
    return judged(
        bench.name,
        f"{label}, against llama.cpp",
        ratio,
        target=target,
        checks=checks,
        speeds=f"{1 / found.median(OURS):.1f} and {1 / found.median(fastest):.1f} tok/s",
        notes=(fastest, *found.notes),
        evidence={**found.evidence, "options": ours.options, **more},
    )


def explained(
    bench: Bench, model: Model, ours: EngineRunner, ratio: Ratio, target: Target | None
) -> dict[str, Any]:
    """After a miss, evidence of where the time of a step goes where `ours` stands: by a twin, with
    a trace. Nothing where the target was reached."""
    if target is None or target.reached_by(ratio.value):
        return {}
    with bench.engine_worker("profile") as worker:
        twin = ours.twin(worker, trace=True)
        twin.fill(model.tokens[: ours.depth])
        tokens = model.tokens[ours.depth : ours.depth + PROFILED_TOKENS]
        return {"profile": by_kind(twin.profile(tokens))}


def _shares(
    bench: Bench,
    label: str,
    found: Race,
    bytes_per_token: float,
    size: int,
    reads: Mapping[str, Read],
    checks: Sequence[Check],
    judge: bool,
) -> Iterator[Row]:
    """Bytes of a token × tokens a second ÷ bytes a second of a read in the same rounds."""
    for name, read in reads.items():
        yield judged(
            bench.name,
            f"{label}, share of the {name}",
            of_rounds(found.costs[name], found.costs[OURS], factor=bytes_per_token),
            unit="%",
            target=SHARES[name] if judge else None,
            checks=checks,
            speeds=f"{bytes_per_token / found.median(OURS) / 1e9:.1f} of "
            f"{1e-9 / found.median(name):.1f} GB/s",
            notes=(f"{read}, a block of {size >> 20} MiB", *found.notes),
            evidence={"bytes_per_token": bytes_per_token, **found.evidence},
        )
