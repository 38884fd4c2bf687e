"""A board, a small model and a stage context, and logs built event by event."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.records import Event
from engine.spool import save_arrays
from harness.boards.facts import CpuFacts, Facts
from harness.deploy.models import PreparedModel, prepare_tiny
from harness.inventory import Board
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.engines import choose_engine
from harness.jobs.runlog import RunLog

SECOND = 1_000_000_000


@dataclasses.dataclass
class LogBuilder:
    """Writes events in order; times in seconds since the run began."""

    folder: Path
    events: list[Event] = dataclasses.field(default_factory=list)

    def add(self, kind: str, at_s: float = 0.0, /, **data: Any) -> LogBuilder:
        t_ns = 5 * SECOND + int(at_s * SECOND)
        self.events.append(Event(len(self.events), t_ns, kind, data))
        return self

    def data(self, name: str, value: Any, at_s: float = 0.0) -> LogBuilder:
        return self.add("data", at_s, name=name, value=value)

    def arrays(self, name: str, **arrays: Any) -> LogBuilder:
        self.folder.mkdir(exist_ok=True)
        return self.add("array", **save_arrays(self.folder, name, arrays))

    def started(self, **ready: Any) -> LogBuilder:
        self.add("run-start", run_id="run-1", boot_id="b")
        self.add("engine-start", attempt=0, pid=1)
        return self.add("ready", attempt=0, **ready)

    def ended(self, status: str = "finished", reason: str = "", **exit_data: Any) -> RunLog:
        self.add("engine-exit", 100.0, **{"attempt": 0, "planned": False, "code": 0, **exit_data})
        self.add("run-end", 100.0, status=status, reason=reason)
        return self.log(status, reason)

    def log(self, status: str, reason: str = "") -> RunLog:
        return RunLog("run-1", self.events, self.folder, status, reason)


@pytest.fixture
def build(tmp_path: Path) -> LogBuilder:
    return LogBuilder(tmp_path / "log")


@pytest.fixture(scope="session")
def tiny_model() -> PreparedModel:
    return prepare_tiny(7)


@pytest.fixture(autouse=True)
def no_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINE_FAULT", raising=False)


@pytest.fixture
def stage_context(tiny_model: PreparedModel, tmp_path: Path) -> Callable[..., StageContext]:
    """`stage_context(board={…}, **options)`: a context around the tiny model."""

    def make(board: Mapping[str, Any] | None = None, **options: Any) -> StageContext:
        made = Board(**{"name": "bench-1", "host": "192.0.2.1", **(board or {})})
        asked = BringupOptions(**{"engine": {"unit": "packed"}, **options})
        facts = Facts(
            machine="x86_64",
            kernel="Linux",
            cpus=tuple(CpuFacts(number=n, capacity=400 + 600 * (n > 1)) for n in range(4)),
        )
        return StageContext(
            board=made,
            facts=facts,
            model=tiny_model,
            options=asked,
            run_id="run-1",
            remote_package="/board/model.pkg",
            cache=tmp_path / "inputs",
            engine=choose_engine(made, facts, asked.engine, why_not_native="no compiler is here"),
        )

    return make
