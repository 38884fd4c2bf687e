"""llama.cpp at its best: every build and setting is tried, and the fastest run in the race."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .context import Bench
from .llama_cpp import Environment
from .models import Model
from .protocol import Worker, WorkerDied
from .race import race, seconds_per_token
from .runners import LlamaRunner, LlamaSetting

SCAN_ROUNDS = 3
SCAN_TOKENS = 12  # of a decode phase while looking for the fastest
NEAR = 1.1  # settings within this factor of the fastest run in the race as well
FINALISTS = 2
PROBE_TOKENS = 4


class Opponents:
    """A worker for each build and setting, so that one that dies takes no other along.

    A build whose tile instructions are not permitted dies at the first batch of several tokens; it
    is then used for single tokens alone, over a cache that another one has filled.
    """

    def __init__(self, bench: Bench, model: Model, context: int, stack: ExitStack) -> None:
        self._bench, self._stack = bench, stack
        self.notes: list[str] = []
        self.runners: list[LlamaRunner] = []
        self._single: set[LlamaSetting] = set()  # that can only take one token at a time
        self._workers: list[Worker] = []
        for environment in bench.llama:
            for repack in (True, False):
                for flash in (False, True):
                    setting = LlamaSetting(environment.build, flash, repack)
                    start = self._starter(environment, model, setting, context)
                    self._enter(setting, start)
        if not self.runners:
            raise WorkerDied(f"no setting of llama.cpp runs: {'; '.join(self.notes)}")

    def _starter(
        self, environment: Environment, model: Model, setting: LlamaSetting, context: int
    ) -> Callable[[int | None], LlamaRunner]:
        def start(batch: int | None) -> LlamaRunner:
            worker = self._stack.enter_context(self._bench.llama_worker(environment))
            self._workers.append(worker)
            return LlamaRunner(
                worker, model.path, setting, self._bench.threads, context, batch=batch
            )

        return start

    def _enter(self, setting: LlamaSetting, start: Callable[[int | None], LlamaRunner]) -> None:
        probe = list(range(PROBE_TOKENS))
        try:
            runner = start(None)
            runner.prefill(probe)
        except WorkerDied as error:
            reason = f"{setting}: dies at a batch of several tokens ({_signal(error)})"
            try:
                runner = start(1)
                runner.phase(probe)
            except WorkerDied as again:
                self.notes.append(f"{setting}: does not run ({_signal(again)})")
                return
            self.notes.append(reason)
            self._single.add(setting)
        self.runners.append(runner)

    @property
    def pids(self) -> list[int]:
        return [runner.worker.pid for runner in self.runners]

    @property
    def batching(self) -> list[LlamaRunner]:
        """Those that can take several tokens at once: that prefill as well as decode."""
        return [runner for runner in self.runners if runner.setting not in self._single]

    @property
    def decoding(self) -> list[LlamaRunner]:
        """Those that can only decode here."""
        return [runner for runner in self.runners if runner.setting in self._single]

    def fill(self, tokens: Sequence[int]) -> None:
        """All caches up to the whole of `tokens`: filled once for each flash setting, whose caches
        are alike, and handed to the others as a file."""
        for flash in (False, True):
            same = [runner for runner in self.runners if runner.setting.flash == flash]
            able = [runner for runner in same if runner in self.batching]
            if not tokens or not same or same[0].depth == len(tokens):
                continue
            first, path = (able or same)[0], self._state(flash)
            first.fill(tokens)
            try:
                first.save(path)
                for runner in same:
                    if runner is not first:
                        runner.load(path, len(tokens))
            finally:
                path.unlink(missing_ok=True)

    def finalists(
        self,
        tokens: Sequence[int],
        among: Sequence[LlamaRunner],
        *,
        prefill: bool = False,
    ) -> list[LlamaRunner]:
        """The fastest `among` some at decoding `tokens` one by one (or at prefilling them) where
        they stand; none of none."""
        runners = list(among)
        if not runners:
            return []

        def phase(runner: LlamaRunner) -> Callable[[], float]:
            if prefill:
                return lambda: runner.prefill(tokens)
            return lambda: seconds_per_token(runner.phase(tokens[:SCAN_TOKENS]))

        phases = {runner.name: phase(runner) for runner in runners}
        self._bench.log(f"{len(runners)} settings of llama.cpp look for the fastest")
        rounds = 2 if self._bench.quick else SCAN_ROUNDS
        found = race(phases, rounds, self.pids)
        order = sorted(runners, key=lambda runner: found.median(runner.name))
        limit = NEAR * found.median(order[0].name)
        return [item for item in order if found.median(item.name) <= limit][:FINALISTS]

    def _state(self, flash: bool) -> Path:
        return self._bench.cache / f"state-{'flash' if flash else 'plain'}-{self._workers[0].pid}"


@contextmanager
def opponents(bench: Bench, model: Model, context: int) -> Iterator[Opponents]:
    """Raises NoLlama where there is none, WorkerDied where no setting runs."""
    with ExitStack() as stack:
        yield Opponents(bench, model, context, stack)


def _signal(error: WorkerDied) -> str:
    """Only how it ended; what it printed is in its log."""
    return str(error).partition(" ended by ")[2].partition(" in ")[0] or str(error)
