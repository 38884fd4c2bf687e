"""Decode speed at several depths, against llama.cpp and against what memory gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

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
AnyRunner = TypeVar("AnyRunner", bound=Runner)


def decode_phase(runner: Runner, tokens: Sequence[int]) -> Phase:
    return lambda: seconds_per_token(runner.phase(tokens))


def against_llama(
    bench: Bench, name: str, targets: Mapping[int, Target], *, count: int, judge_shares: bool
) -> Iterator[Row]:
    """Rows of one model at the depths of `targets`; `count` tokens a phase.

    Each depth is one race of ours (weights mapped and in huge pages; the faster counts, as the
    ladder would choose), llama.cpp's fastest settings, and two ways to read memory. Settings of
    llama.cpp that cannot prefill on this machine have a row of their own without a target.
    `judge_shares`: whether the shares of the bandwidth have a target, at the first depth.
    """
    model = bench.model(name)
    last = min(model.context - CHECKED - count, QUICK_DEPTH if bench.quick else model.context)
    depths = [depth for depth in sorted(targets) if depth <= last]
    with ExitStack() as stack:
        field = _Field(bench, model, depths[-1] + CHECKED + count, stack)
        size = field.ours[0].weight_bytes
        if judge_shares or size > last_level_cache():
            size = beyond_caches()
        worker = field.ours[0].worker
        reads = {LINEAR: PLAIN, BEST: best_read(worker, bench.threads, size, quick=bench.quick)}
        for depth in depths:
            bench.log(f"{model.name}: depth {depth}")
            tokens = model.tokens[depth : depth + count]
            field.go(depth, tokens)
            checked = model.tokens[depth : depth + CHECKED]
            checks = dict(
                zip(
                    field.contestants,
                    golden(field.contestants, bench.reference(model, depth), checked),
                    strict=True,
                )
            )
            phases = {item.name: decode_phase(item, tokens) for item in field.contestants}
            for kind, read in reads.items():
                phases[kind] = seconds_per_byte(worker, bench.threads, size, read)
            found = race(phases, bench.rounds, [item.worker.pid for item in field.contestants])
            label = f"{model.name}, depth {depth}"
            ours = _fastest(found, field.ours)
            if field.against is None:
                title = f"{label}, against llama.cpp"
                yield Row(bench.name, title, SKIPPED, notes=(bench.no_llama,))
            for title, rivals, target in (
                ("against llama.cpp", field.rivals, targets[depth]),
                ("against a llama.cpp that cannot prefill here", field.crippled, None),
            ):
                if rivals:
                    rival = _fastest(found, rivals)
                    both = [checks[ours], checks[rival]]
                    title = f"{label}, {title}"
                    yield _ratio(bench, model, title, found, ours, rival, target, both)
            judge = judge_shares and depth == depths[0]
            middle = ours.bytes_per_token(depth + count / 2)
            yield from _shares(
                bench, label, found, ours, middle, size, reads, [checks[ours]], judge
            )
        for note in field.against.notes if field.against is not None else ():
            bench.log(note)


class _Field:
    """Who runs: ours, and the fastest of llama.cpp where the race is held."""

    def __init__(self, bench: Bench, model: Model, context: int, stack: ExitStack) -> None:
        self._model = model
        self.ours = [
            EngineRunner(
                f"{OURS}, {how}",
                stack.enter_context(bench.engine_worker(f"engine, {how}")),
                bench.package(model),
                bench.options(huge_pages=huge),
                context,
            )
            for how, huge in (("weights mapped", False), ("weights in huge pages", True))
        ]
        self.against: Opponents | None = None
        self.rivals: list[LlamaRunner] = []
        self.crippled: list[LlamaRunner] = []
        if not bench.no_llama:
            bench.log(f"{model.name}: opening every setting of llama.cpp")
            self.against = Opponents(bench, model, context, stack)

    def go(self, depth: int, tokens: Sequence[int]) -> None:
        """All to `depth`; `tokens` tell who is fast there."""
        for runner in self.ours:
            runner.fill(self._model.tokens[:depth])
        if self.against is not None:
            self.against.fill(self._model.tokens[:depth])
            self.rivals = self.against.finalists(tokens, self.against.batching)
            self.crippled = self.against.finalists(tokens, self.against.decoding)[:1]

    @property
    def contestants(self) -> list[Runner]:
        return [*self.ours, *self.rivals, *self.crippled]


def _fastest(found: Race, runners: Sequence[AnyRunner]) -> AnyRunner:
    best = found.best([runner.name for runner in runners])
    return next(runner for runner in runners if runner.name == best)


def _ratio(
    bench: Bench,
    model: Model,
    title: str,
    found: Race,
    ours: EngineRunner,
    rival: LlamaRunner,
    target: Target | None,
    checks: Sequence[Check],
) -> Row:
    ratio = found.ratio(rival.name, ours.name)
    more = explained(bench, model, ours, ratio, target)
    return judged(
        bench.name,
        title,
        ratio,
        target=target,
        checks=checks,
        speeds=f"{1 / found.median(ours.name):.1f} and {1 / found.median(rival.name):.1f} tok/s",
        notes=(ours.name, rival.name, *found.notes),
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
    ours: EngineRunner,
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
            of_rounds(found.costs[name], found.costs[ours.name], factor=bytes_per_token),
            unit="%",
            target=SHARES[name] if judge else None,
            checks=checks,
            speeds=f"{bytes_per_token / found.median(ours.name) / 1e9:.1f} of "
            f"{1e-9 / found.median(name):.1f} GB/s",
            notes=(f"{read}, a block of {size >> 20} MiB", *found.notes),
            evidence={"bytes_per_token": bytes_per_token, **found.evidence},
        )
