"""Ends of runs, built from what a supervisor tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.records import Event
from harness.jobs.runlog import RunLog
from harness.triage.case import Case

ARM = {"machine": "aarch64", "cpus": [{"number": 0, "features": ["fp", "asimd", "crc32"]}]}


@dataclasses.dataclass
class End:
    """`end(signal="SIGILL", record=…)` is a case; `evidence` are parts of the supervisor's."""

    folder: Path

    def __call__(
        self,
        status: str = "failed",
        *,
        reason: str = "",
        error: Mapping[str, Any] | None = None,
        ready: Mapping[str, Any] | None = None,
        output: str = "",
        stacks: str = "",
        facts: Mapping[str, Any] = ARM,
        samples: tuple[tuple[float, float], ...] = (),
        evidence: Mapping[str, Any] | None = None,
        record: str = "",
        **exit_data: Any,
    ) -> Case:
        events: list[tuple[str, Mapping[str, Any]]] = [
            ("run-start", {"run_id": "r", "boot_id": "b"}),
            ("engine-start", {"attempt": 0, "pid": 4212}),
        ]
        if ready is not None:
            events.append(("ready", {"attempt": 0, **ready}))
        events += [("sample", {"rss_mb": a, "mem_available_mb": b}) for a, b in samples]
        if error is not None:
            events.append(("error", error))
        if stacks:
            events.append(("log", {"attempt": 0, "message": "silent", "stacks": stacks}))
        if evidence is not None or record:
            told = {"attempt": 0, "pid": 4212, "record": record, **(evidence or {})}
            events.append(("evidence", told))
        if output:
            self.folder.mkdir(exist_ok=True)
            (self.folder / "engine.0.log").write_text(output)
        told = {"attempt": 0, "pid": 4212, "planned": False, **exit_data}
        events += [("engine-exit", told), ("run-end", {"status": status, "reason": reason})]
        made = [Event(n, n * 10**9, kind, data) for n, (kind, data) in enumerate(events)]
        return Case(RunLog("r", made, self.folder, status, reason), facts)


@pytest.fixture
def end(tmp_path: Path) -> Callable[..., Case]:
    return End(tmp_path / "log")
