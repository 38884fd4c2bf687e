"""Contestants of a race: a session of our engine or of llama.cpp, with one shape."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .gates import COARSE, EXACT, HALF, ROUNDED, Gate
from .protocol import Worker

_numbers = itertools.count(1)


class Runner:
    """One sequence in one session of a worker. Positions below `depth` stay between phases."""

    gate: Gate = ROUNDED

    def __init__(self, name: str, worker: Worker) -> None:
        self.name, self.worker = name, worker
        self.session = f"s{next(_numbers)}"
        self.depth = 0

    def fill(self, tokens: Sequence[int]) -> float:
        """Prefill from `depth` up to the whole of `tokens`; returns seconds."""
        more = list(tokens[self.depth :])
        self.depth = len(tokens)
        return float(self._ask("feed", tokens=more)["seconds"]) if more else 0.0

    def phase(self, tokens: Sequence[int]) -> list[float]:
        """Decode `tokens` one by one behind `depth` and forget them; seconds of each."""
        seconds: list[float] = self._ask("decode", tokens=list(tokens))["seconds"]
        self.back()
        return seconds

    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds to feed `tokens` behind `depth`; they are forgotten."""
        seconds = float(self._ask("feed", tokens=list(tokens))["seconds"])
        self.back()
        return seconds

    def predictions(
        self, tokens: Sequence[int], ids: Sequence[Sequence[int]], mode: str
    ) -> dict[str, Any]:
        found = self._ask("check", tokens=list(tokens), ids=[list(row) for row in ids], mode=mode)
        self.back()
        return found

    def back(self) -> None:
        """To `depth` again."""
        self._ask("truncate", position=self.depth)

    def close(self) -> None:
        """Only the session: the worker may have others."""
        self._ask("close")

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:
        return self.worker.ask(do, session=self.session, **fields)


class EngineRunner(Runner):
    """`options` as EngineOptions takes them."""

    def __init__(
        self,
        name: str,
        worker: Worker,
        package: Path,
        options: Mapping[str, Any],
        context: int,
        *,
        trace: bool = False,
    ) -> None:
        super().__init__(name, worker)
        self._package, self._context = package, context
        told = self._ask(
            "open", package=str(package), options=dict(options), context=context, trace=trace
        )
        self.load_s = float(told["seconds"])
        self.weight_bytes = int(told["weight_bytes"])
        self.kv_bytes_per_position = int(told["kv_bytes_per_position"])
        self.options: dict[str, Any] = told["options"]
        self.gate = gate_of(self.options)

    def twin(self, worker: Worker, *, trace: bool) -> EngineRunner:
        """The same in another worker, with an empty cache."""
        return EngineRunner(
            self.name, worker, self._package, self.options, self._context, trace=trace
        )

    def bytes_per_token(self, position: float) -> float:
        """What a decode step at `position` must read."""
        return self.weight_bytes + self.kv_bytes_per_position * position

    def warm_up(self) -> float:
        """Seconds of it."""
        return float(self._ask("warm_up")["seconds"])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens: list[int] = self._ask("greedy", prompt=list(prompt), count=count)["tokens"]
        self.depth = 0
        return tokens

    def profile(self, tokens: Sequence[int], mode: str = "decode") -> list[dict[str, Any]]:
        """Seconds of each op, per token or ("prefill") of all `tokens`; needs a trace."""
        ops: list[dict[str, Any]] = self._ask("profile", tokens=list(tokens), mode=mode)["ops"]
        self.back()
        return ops


def gate_of(options: Mapping[str, Any]) -> Gate:
    """What these options must keep of the float reference's predictions."""
    if options["kv"] == "int4":
        return COARSE
    if options["activations"] == "int8" or options["kv"] == "int8":
        return ROUNDED
    return HALF if options["kv"] == "f16" else EXACT


@dataclasses.dataclass(frozen=True)
class LlamaSetting:
    """What may be chosen in llama.cpp, its build included."""

    build: str
    flash: bool
    repack: bool

    def __str__(self) -> str:
        parts = (
            self.build,
            "flash attention" if self.flash else "no flash attention",
            "repacked" if self.repack else "as in the file",
        )
        return ", ".join(parts)


class LlamaRunner(Runner):
    def __init__(
        self,
        worker: Worker,
        model: Path,
        setting: LlamaSetting,
        threads: int,
        context: int,
        *,
        batch: int | None = None,
    ) -> None:
        super().__init__(f"llama.cpp ({setting})", worker)
        self.setting = setting
        fields = {} if batch is None else {"batch": batch}
        self._ask(
            "open",
            model=str(model),
            threads=threads,
            context=context,
            flash=setting.flash,
            repack=setting.repack,
            **fields,
        )

    def save(self, path: Path) -> None:
        self._ask("save", path=str(path))

    def load(self, path: Path, depth: int) -> None:
        """Take over the cache that another session of the same flash setting has saved."""
        self._ask("load", path=str(path), position=depth)
        self.depth = depth
