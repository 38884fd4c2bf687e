"""The thread ladder, the board's part: in how many threads, and on which cores, decode is fastest.

Decode is bound by memory, so it is often best below all cores, and never on small ones while big
ones are free. Every rung (a number of threads on a set of cores) first writes a golden text; then
rungs are timed in turns, in another order each round, because a board gets warmer and other work
comes and goes. With the winner, where asked, the layouts of the KV cache are compared at a depth,
and weights in huge pages with mapped ones.

Parameters: `golden`; `rounds`; `budget_s`; `threads` and `cpus` where they are given (else all
candidates are tried); `layouts` of the KV cache to compare and the `depth` in positions; `huge`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.measure.context import JobContext, JobError
from engine.measure.golden import golden
from engine.placement import Placement, allowed_here, candidates, collect, parse_cores

if TYPE_CHECKING:
    from engine.decode import Decoder

ALIKE = 0.03  # slower than the best: fewer threads as fast leave cores to others, and stay cooler
UNSURE, MOST_UNSURE = 2.0, 0.25  # standard errors that count as alike; and a share, at most
MOST_TOKENS, FEWEST_TOKENS = 48, 4  # of one visit
WARM_TOKENS = 2  # untimed at the start of a visit: the cores come from other work
ROOM = 8  # positions beyond what is decoded


@dataclasses.dataclass
class Rung:
    """One way to run, and what it was measured at. `cpus` None: all that are allowed."""

    question: str  # "threads", "kv_layout" or "huge_pages": what it is an answer to
    threads: int
    cpus: tuple[int, ...] | None
    kv_layout: str
    huge_pages: bool
    medians_ns: list[float] = dataclasses.field(default_factory=list)  # one for each visit

    @property
    def tokens_per_s(self) -> float:
        """Of the median visit."""
        return 1e9 / float(np.median(self.medians_ns))

    @property
    def unsure(self) -> float:
        """The standard error of the median visit, as a share of it: 1.2533 σ / √n for values near
        normal, with σ from their median absolute deviation (σ = 1.4826 MAD)."""
        times = np.asarray(self.medians_ns)
        middle = float(np.median(times))
        spread = 1.4826 * float(np.median(np.abs(times - middle)))
        return 1.2533 * spread / float(np.sqrt(len(times))) / middle

    def told(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "tokens_per_s": self.tokens_per_s if self.medians_ns else None,
        }


def run(context: JobContext) -> None:
    ladder = Ladder(context)
    cores = collect()
    allowed = allowed_here()
    context.data("cores", {"told": cores, "allowed": allowed})
    places = placements(cores, allowed, context.spec.parameters, ladder.unit)
    best = ladder.climb(
        [ladder.rung("threads", place.threads, place.cpus) for place in places], ladder.start
    )
    layouts = [str(name) for name in context.spec.parameters.get("layouts", ())]
    if len(layouts) > 1:
        rungs = [
            dataclasses.replace(best, question="kv_layout", kv_layout=name, medians_ns=[])
            for name in layouts
        ]
        best = ladder.climb(rungs, int(context.parameter("depth")))
    if context.spec.parameters.get("huge"):
        rungs = [
            dataclasses.replace(best, question="huge_pages", huge_pages=huge, medians_ns=[])
            for huge in (False, True)
        ]
        best = ladder.climb(rungs, ladder.start)
    context.data("rungs", [rung.told() for rung in ladder.rungs])
    context.data("choice", best.told())
    context.array("visits", **ladder.table())


def placements(
    cores: str, allowed: Sequence[int], given: Mapping[str, Any], unit: str
) -> list[Placement]:
    """The threads and cores to try: candidates of the board, as far as they are left open.

    The numpy units have one thread (their BLAS is told its count before Python starts).
    """
    cpus = given.get("cpus")
    here = tuple(cpu for cpu in cpus if cpu in allowed) if cpus else tuple(allowed)
    found = candidates(parse_cores(cores), here or allowed)
    if cpus and here:  # "all that are allowed" are those that were named
        found = [dataclasses.replace(place, cpus=place.cpus or here) for place in found]
    threads = given.get("threads")
    if threads is None and unit != "native":
        threads = 1
    if threads is None:
        return found
    masks: list[tuple[int, ...] | None] = []
    for place in found:
        if place.cpus not in masks and len(place.cpus or allowed) >= int(threads):
            masks.append(place.cpus)
    return [Placement(int(threads), mask) for mask in masks] or [
        Placement(int(threads), here if cpus else None)
    ]


def best_of(rungs: Sequence[Rung]) -> Rung:
    """The first that is as fast as the fastest, within what repetitions differ by."""
    fastest = max(rungs, key=lambda rung: rung.tokens_per_s)

    def alike(rung: Rung) -> bool:
        share = max(ALIKE, min(MOST_UNSURE, UNSURE * max(rung.unsure, fastest.unsure)))
        return rung.tokens_per_s >= (1 - share) * fastest.tokens_per_s

    return next(rung for rung in rungs if alike(rung))


class Ladder:
    """Measures rungs against each other. `start` is the position that short decodes begin at."""

    def __init__(self, context: JobContext) -> None:
        self.context = context
        self.rounds = int(context.parameter("rounds"))
        self.budget_s = float(context.parameter("budget_s"))
        self.unit = context.options.unit
        self.start = len(context.parameter("golden")["prompt"]) + int(
            context.parameter("golden")["count"]
        )
        package = context.package
        if package is None:
            raise JobError(f"job {context.spec.job}: the spec names no package")
        self.limit = package.hyperparameters.context
        self.allowed = allowed_here()
        self.rungs: list[Rung] = []
        self.questions = 1 + bool(context.spec.parameters.get("layouts"))
        self.questions += bool(context.spec.parameters.get("huge"))
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._generator = np.random.Generator(np.random.Philox(key=context.spec.seed))

    def rung(self, question: str, threads: int, cpus: tuple[int, ...] | None) -> Rung:
        options = self.context.options
        return Rung(question, threads, cpus, options.kv_layout, options.huge_pages)

    def climb(self, rungs: Sequence[Rung], position: int) -> Rung:
        """Measures `rungs` at a cache position in turns, and returns the best."""
        position = max(0, min(position, self.limit - MOST_TOKENS - WARM_TOKENS))
        first = len(self.rungs)
        self.rungs += rungs
        decoders = [self._open(rung, position) for rung in rungs]
        try:
            count = self._tokens_of_a_visit(rungs, decoders, position)
            for number in range(self.rounds):
                for index in self._generator.permutation(len(rungs)).tolist():
                    rung = rungs[index]
                    self._enter(rung)
                    times = self._visit(decoders[index], position, count)
                    rung.medians_ns.append(float(np.median(times)))
                    self._rows += [
                        (first + index, number, step, position + step, time_ns)
                        for step, time_ns in enumerate(times)
                    ]
                share = (number + 1) / self.rounds
                done = (len({rung.question for rung in self.rungs}) - 1 + share) / self.questions
                self.context.progress(done, 1.0, f"round {number + 1} of {rungs[0].question}")
        finally:
            for decoder in decoders:
                decoder.close()
            self._leave()
        return best_of(rungs)

    def table(self) -> dict[str, Any]:
        """Every timed token: which rung, round, step of its visit, position and nanoseconds."""
        rows = np.array(self._rows, np.int64).reshape(-1, 5)
        names = ("rung", "round", "step", "position", "duration_ns")
        return {name: rows[:, column] for column, name in enumerate(names)}

    def _open(self, rung: Rung, position: int) -> Decoder:
        """A decoder whose threads begin on the rung's cores, after its golden text."""
        self._enter(rung)
        size = min(self.limit, max(self.start, position) + MOST_TOKENS + WARM_TOKENS + ROOM)
        decoder = self.context.decoder(
            context=size,
            threads=rung.threads,
            kv_layout=rung.kv_layout,
            huge_pages=rung.huge_pages,
        )
        golden(decoder, self.context, f"{rung.question}: {name_of(rung)}")
        if position > self.start:
            self._fill(decoder)
        return decoder

    def _fill(self, decoder: Decoder) -> None:
        """Numbers into every slot: pages that were never written are one page of zeros, which a
        core's cache holds."""
        generator = np.random.Generator(np.random.Philox(key=self.context.spec.seed))
        for view in decoder.cache.buffers().values():
            view[:] = generator.standard_normal(view.shape, np.float32)

    def _tokens_of_a_visit(
        self, rungs: Sequence[Rung], decoders: Sequence[Decoder], position: int
    ) -> int:
        """So many that all visits take the question's share of the time."""
        self._enter(rungs[0])
        token_s = float(np.median(self._visit(decoders[0], position, FEWEST_TOKENS))) / 1e9
        visits = self.rounds * len(rungs) * self.questions
        count = int(self.budget_s / visits / token_s) - WARM_TOKENS
        room = decoders[0].context - position - WARM_TOKENS
        return max(1, min(room, MOST_TOKENS, max(FEWEST_TOKENS, count)))

    def _visit(self, decoder: Decoder, position: int, count: int) -> list[int]:
        """Nanoseconds of each of `count` tokens from `position` on."""
        tokens = np.array([self.context.parameter("golden")["prompt"][0]], np.int64)
        decoder.seek(position)
        for _ in range(WARM_TOKENS):
            decoder.advance(tokens)
        times = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            decoder.advance(tokens)
            times.append(time.perf_counter_ns() - begin)
        return times

    def _enter(self, rung: Rung) -> None:
        """This thread onto the rung's cores; the threads that it starts from here on as well."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, rung.cpus or self.allowed)

    def _leave(self) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.allowed)


def name_of(rung: Rung) -> str:
    """ "2 threads on cores 4-7, ds, huge pages"."""
    words = [str(Placement(rung.threads, rung.cpus)), rung.kv_layout]
    return ", ".join([*words, "huge pages"] if rung.huge_pages else words)
