"""Runs for tests: specs from steps, supervised here or on a virtual board."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import engine
from engine.records import Event, Restart, RunSpec
from harness.boards import virtual
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.deploy.push import Deployment
from harness.inventory import Board
from harness.jobs import lifecycle
from harness.jobs.lifecycle import RemoteRun, RunLog

STANDIN = Path(__file__).with_name("standin.py")
# A supervisor whose engine is the stand-in. Run by path: no module of ours is imported twice.
LAUNCHER = """
import os, sys
from pathlib import Path
from engine import supervisor
supervisor.GRACE_S = supervisor.LOOK_S = 0.5
supervisor.EVENTS_LIMIT = int(os.environ.get("TEST_EVENTS_LIMIT", supervisor.EVENTS_LIMIT))
def command(spec, spool, fd, attempt):
    return [sys.executable, {standin!r}, str(spec), "--spool", str(spool),
            "--events-fd", str(fd), "--attempt", str(attempt)]
sys.exit(supervisor.main(sys.argv[1:], command=command))
"""


def make_spec(steps: Sequence[Mapping[str, Any]], **fields: Any) -> RunSpec:
    values: dict[str, Any] = {"sample_period_s": 0.1, "deadline_s": 60.0, **fields}
    restarts = tuple(Restart(**item) for item in values.pop("restarts", ()))
    return RunSpec(
        run_id=values.pop("run_id", uuid.uuid4().hex),
        job="standin",
        package=None,
        package_sha256=None,
        parameters={"steps": list(steps)},
        restarts=restarts,
        **values,
    )


class Watching:
    """What tests ask of the world while they wait."""

    @staticmethod
    def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
        """The first true answer of `condition`; fails when there is none in time."""
        deadline = Deadline.after(seconds)
        while not (found := condition()):
            if deadline.expired:
                raise AssertionError(f"after {seconds} s still not: {what}")
            time.sleep(0.02)
        return found

    @staticmethod
    def alive(pid: int) -> bool:
        return alive(pid)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclasses.dataclass
class Supervised(Watching):
    """A supervisor on this machine and its spool."""

    spool: Path
    process: subprocess.Popen[bytes]

    @property
    def events(self) -> list[Event]:
        path = self.spool / "events.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [Event.from_line(line) for line in lines]

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def values(self, name: str) -> list[Any]:
        return [e.data["value"] for e in self.of_kind("data") if e.data["name"] == name]

    def wait(self, seconds: float = 30.0) -> dict[str, Any]:
        """Its run-end."""
        self.process.wait(timeout=seconds)
        last = self.events[-1]
        assert last.kind == "run-end"
        return dict(last.data)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    """Start a supervisor with the stand-in as its engine: `supervise(steps, **spec fields)`."""
    started: list[Supervised] = []

    def run(steps: Sequence[Mapping[str, Any]], *flags: str, **fields: Any) -> Supervised:
        spool = tmp_path / f"spool{len(started)}"
        spec = tmp_path / f"spec{len(started)}.json"
        spec.write_text(make_spec(steps, **fields).to_json())
        command = [sys.executable, "-c", LAUNCHER.format(standin=str(STANDIN))]
        process = subprocess.Popen(
            [*command, str(spec), "--spool", str(spool), *flags], stdout=subprocess.PIPE
        )
        started.append(Supervised(spool, process))
        return started[-1]

    yield run
    for item in started:
        item.process.kill()
        item.process.communicate()
        record = item.spool / "supervisor.json"
        if record.exists() and alive(pid := json.loads(record.read_text())["pid"]):
            os.kill(pid, 9)


@pytest.fixture(scope="session")
def engine_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine with the stand-in as one more job."""
    root = tmp_path_factory.mktemp("engine")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(engine.__file__).parent, root / "engine", ignore=ignore)
    shutil.copy(STANDIN, root / "engine" / "measure" / "standin.py")
    return root


class Bench(Watching):
    """A virtual board with an engine on it, as `deploy` would leave it."""

    def __init__(self, board: Board, engine_copy: Path, root: Path) -> None:
        self.board = board
        libraries = {Path(module.__file__ or "").parents[1] for module in (np, psutil)}
        path = os.pathsep.join(map(str, [engine_copy, *sorted(libraries)]))
        self.deployment = Deployment(str(root), ("python3", "-S", "-s"), {"PYTHONPATH": path}, {})
        self.current: BoardSession | None = None
        self.opened = 0

    def session(self) -> BoardSession:
        """The live connection, a new one when the last is gone."""
        if self.current is None or not self.current.alive:
            self.current = open_session(self.board, deadline=Deadline.after(30))
            self.opened += 1
        return self.current

    def start(self, steps: Sequence[Mapping[str, Any]], **fields: Any) -> RemoteRun:
        inputs, environment = fields.pop("inputs", None), fields.pop("environment", {})
        return lifecycle.start(
            self.session(),
            self.deployment,
            make_spec(steps, **fields),
            inputs,
            environment=environment,
            deadline=Deadline.after(60),
        )

    def follow(self, run: RemoteRun, folder: Path, **options: Any) -> RunLog:
        options.setdefault("deadline", Deadline.after(60, "the test's patience"))
        return lifecycle.follow(self.session, run, folder, **options)

    def clean_up(self, run: RemoteRun) -> list[str]:
        return lifecycle.clean_up(self.session(), self.deployment, run, Deadline.after(30))

    def supervisor(self, run: RemoteRun) -> int:
        return int(json.loads((Path(run.spool) / "supervisor.json").read_text())["pid"])


@pytest.fixture
def bench(engine_copy: Path, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Make a virtual board with the given faults: `bench(drop_link_at=2)`."""
    made: list[Bench] = []

    def make(folder: str = "work", **faults: Any) -> Bench:
        board = Board(name=f"run-{uuid.uuid4().hex[:8]}", virtual=faults)
        made.append(Bench(board, engine_copy, tmp_path / f"{folder}{len(made)}"))
        return made[-1]

    yield make
    for item in made:
        if item.current is not None:
            item.current.close()
        virtual.stop(item.board)
