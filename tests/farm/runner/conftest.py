"""Virtual boards, a small model and short stages, for campaigns that take seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

# pytester forgets what is imported during a test of its own; this one must not be loaded twice.
import sqlalchemy.dialects.postgresql  # noqa: F401 - as above

from harness.boards import virtual
from harness.boards.leases import Leases
from harness.deadline import Deadline
from harness.deploy.models import PreparedModel, prepare_model
from harness.farm.progress import Silent
from harness.farm.results import CampaignResult
from harness.farm.runner import Resume, bringup
from harness.farm.selection import bringup_options, choose_boards, choose_stages
from harness.inventory import Board
from harness.jobs.base import BringupOptions
from harness.store import Store
from harness.verdicts import Verdict

T = TypeVar("T")


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a GGUF file, with a tokenizer and one layer more than the tiny stage's."""
    from engine.formats.gguf_writer import write_gguf
    from engine.formats.synthetic import SyntheticCheckpoint

    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=7, layers=3), path)
    return path


@pytest.fixture(scope="session")
def model(model_file: Path) -> PreparedModel:
    return prepare_model(model_file)


@pytest.fixture(scope="session")
def options() -> BringupOptions:
    """Stages as short as they may be."""
    return bringup_options(
        stress_minutes=0.1,
        stress_context=96,
        curve_seconds=2.0,
        context=96,
        accuracy_tokens=24,
        accuracy_positions=24,
        accuracy_rows=3,
    )


class Recorder(Silent):
    """Keeps what was told, and can act on it."""

    def __init__(self, act: Callable[[str, str, float | None], None] | None = None) -> None:
        self.notes: list[str] = []
        self.order: list[tuple[str, str]] = []  # (board, stage) as they ended
        self._act = act

    def activity(self, board: str, stage: str, text: str, fraction: float | None = None) -> None:
        del text
        if self._act is not None:
            self._act(board, stage, fraction)

    def finished(self, board: str, stage: str, verdict: Verdict, *, reused: bool) -> None:
        del verdict, reused
        self.order.append((board, stage))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Command:
    """`harness …` as a process of its own."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.log = folder / "stderr.txt"
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.cli.main", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self, timeout: float = 120) -> tuple[int, dict[str, Any]]:
        """Exit code and the JSON result."""
        output, _ = self.process.communicate(timeout=timeout)
        assert output, self.log.read_text()
        return self.process.returncode, json.loads(output)


class Lab:
    """Boards, state and campaigns of one test."""

    def __init__(
        self, folder: Path, home: Path, model: PreparedModel, options: BringupOptions
    ) -> None:
        self.folder, self.home, self.model, self.options = folder, home, model, options
        self.store = Store.open()
        self.leases = Leases(self.store)
        self.commands: list[Command] = []

    def boards(self, text: str) -> list[Board]:
        """Boards from the text below `boards:` of a devices.yaml, with one thread where they do
        not say otherwise: nothing is left to measure first."""
        path = self.folder / "devices.yaml"
        path.write_text("defaults: {threads: 1, pin: none}\nboards:\n" + text)
        return choose_boards(path, (), ())

    @staticmethod
    def recorder(act: Callable[[str, str, float | None], None] | None = None) -> Recorder:
        return Recorder(act)

    @staticmethod
    def provoking(stage: str) -> Recorder:
        """Timed faults of virtual boards come once when `stage` makes progress, however long it
        took to get there."""
        done: set[str] = set()

        def act(board: str, at: str, fraction: float | None) -> None:
            if at == stage and fraction and board not in done:
                done.add(board)
                virtual.provoke(board)

        return Recorder(act)

    def run(
        self,
        boards: Sequence[Board],
        *,
        stages: Sequence[str] = (),
        reporter: Recorder | None = None,
        stop: threading.Event | None = None,
        resume: Resume = Resume.CRASHED,
    ) -> CampaignResult:
        """A campaign in this process."""
        return bringup(
            boards,
            self.model,
            self.options,
            self.store,
            reporter or Recorder(),
            stop=stop or threading.Event(),
            stages=choose_stages(stages),
            resume=resume,
        )

    def command(self, *arguments: str) -> Command:
        """A campaign in a process of its own."""
        command = Command(arguments, self.folder)
        self.commands.append(command)
        return command

    @staticmethod
    def outcomes(result: CampaignResult, board: str) -> dict[str, str]:
        return {stage: item.outcome.value for stage, item in result.results[board].items()}

    def spools(self) -> list[Path]:
        """Runs that lie on the virtual boards."""
        return [path for path in (self.home / "boards").rglob("runs/*") if path.is_dir()]

    def processes(self) -> list[list[str]]:
        """Commands of living processes that have to do with this test's boards."""
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), process.cwd()]
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            if process.pid != os.getpid() and any(str(self.home) in word for word in words):
                found.append(words)
        return found

    def wait(self, what: Callable[[], T | None], seconds: float = 90.0) -> T:
        """The first true answer of `what`."""
        deadline = Deadline.after(seconds)
        while not deadline.expired:
            answer = what()
            if answer:
                return answer
            time.sleep(0.1)
        logs = [command.log.read_text() for command in self.commands]
        raise AssertionError(f"not within {seconds} s; {logs}")

    def close(self) -> None:
        for command in self.commands:
            if command.process.poll() is None:
                command.kill()
        self.store.close()
        virtual.stop_all()


@pytest.fixture
def lab(
    tmp_path: Path,
    model: PreparedModel,
    options: BringupOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    home = tmp_path / "home"
    monkeypatch.setenv("HARNESS_HOME", str(home))
    made = Lab(tmp_path, home, model, options)
    yield made
    made.close()
