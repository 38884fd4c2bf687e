"""What every benchmark gets: workers, models, packages, references, and how long to measure."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.deploy.models import packer_version
from harness.paths import cache_dir

from . import models
from .gates import EXACT, greedy_at, reference_at, same_text
from .llama_cpp import Environment, NoLlama, environments
from .models import Model
from .predictions import Reference
from .protocol import Worker
from .race import golden
from .results import Check
from .runners import EngineRunner

# Ours at its best: what the native unit runs with, in huge pages.
BEST: Mapping[str, Any] = {"unit": "native", "huge_pages": True}
CHECKED = 32  # positions whose predictions are compared before a speed counts
PROMPT, GREEDY = 16, 24  # tokens given, tokens generated


@dataclasses.dataclass
class Bench:
    """`rounds` of each race; `quick` measures less of everything, for trying things out."""

    name: str
    threads: int
    rounds: int
    quick: bool
    tiny: bool
    folder: Path
    log: Callable[[str], None]
    engine: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(BEST))
    may_build: bool = True

    def sized(self, name: str) -> str:
        """The model to take for `name`: a tiny one of the same recipe when trying things out."""
        if not self.tiny:
            return name
        kind = name.partition("-")[2]
        return f"tiny-{kind if f'tiny-{kind}' in models.NAMES else 'q4_0'}"

    @functools.cached_property
    def cache(self) -> Path:
        return cache_dir("bench")

    @functools.cached_property
    def llama(self) -> list[Environment]:
        """Raises NoLlama."""
        return environments(self.cache, self.log, build=self.may_build)

    @property
    def no_llama(self) -> str:
        """Why there is none, or nothing."""
        try:
            return "" if self.llama else "no environment"
        except NoLlama as error:
            return str(error)

    def model(self, name: str) -> Model:
        return models.prepare(self.sized(name), self.cache, self.log)

    def package(self, model: Model, *, layout: str = "interleaved") -> Path:
        return models.package(model, self.cache, self.log, layout=layout)

    def reference(self, model: Model, depth: int, count: int = CHECKED) -> Reference:
        """By the numpy engine in float32, from a package of its own layout."""
        identity = f"{model.sha256} {packer_version()}"
        path = self.package(model, layout="blocked")
        if depth > 1024:
            self.log(f"reference of {model.name} at depth {depth}: minutes, once")
        return reference_at(path, identity, model.tokens, depth, count, self.cache)

    def checks(self, model: Model, runners: Sequence[EngineRunner]) -> list[Check]:
        """The golden tokens of ours at the start of `model`'s text: predictions of all, and the
        greedy text of those that compute in float throughout."""
        found = golden(runners, self.reference(model, 0), model.tokens[:CHECKED])
        for index, runner in enumerate(runners):
            if runner.gate is EXACT:
                prompt = model.tokens[:PROMPT]
                package = self.package(model, layout="blocked")
                identity = f"{model.sha256} {packer_version()}"
                text, leads = greedy_at(package, identity, prompt, GREEDY, self.cache)
                told = runner.greedy(prompt, GREEDY)
                found[index] = same_text(found[index], text, leads, told)
        return found

    def options(self, **changes: Any) -> dict[str, Any]:
        """Ours at its best, with `changes`."""
        return {"threads": self.threads, **self.engine, **changes}

    @contextmanager
    def engine_worker(
        self, label: str = "engine", environment: Mapping[str, str] | None = None
    ) -> Iterator[Worker]:
        worker = self._start(label, Path(sys.executable), "engine_worker", environment)
        try:
            yield worker
        finally:
            worker.close()

    @contextmanager
    def llama_worker(self, environment: Environment) -> Iterator[Worker]:
        name = f"llama.cpp {environment.build}"
        worker = self._start(name, environment.python, "llama_worker", None)
        try:
            yield worker
        finally:
            worker.close()

    @contextmanager
    def contestants(
        self,
        configurations: Mapping[str, tuple[Path, Mapping[str, Any]]],
        context: int,
        *,
        traced: Collection[str] = (),
    ) -> Iterator[dict[str, EngineRunner]]:
        """Our engine in several configurations, each (package, options) in a process of its own;
        those in `traced` with a trace."""
        workers: list[Worker] = []
        try:
            found: dict[str, EngineRunner] = {}
            for name, (package, options) in configurations.items():
                workers.append(self._start(name, Path(sys.executable), "engine_worker", None))
                found[name] = EngineRunner(
                    name, workers[-1], package, options, context, trace=name in traced
                )
            yield found
        finally:
            for worker in workers:
                worker.close()

    def _start(
        self, label: str, python: Path, module: str, environment: Mapping[str, str] | None
    ) -> Worker:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = "".join(letter if letter.isalnum() else "-" for letter in f"{self.name}-{label}")
        command = [str(python), "-m", f"tests.bench.{module}"]
        # One BLAS thread: the engines' own teams are what is measured.
        chosen = {"OPENBLAS_NUM_THREADS": "1", **(environment or {})}
        return Worker(label, command, self.folder / f"{words}.log", chosen)
