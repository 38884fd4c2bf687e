"""An engine that says nothing for too long is looked at, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.watchdog import answer_to_requests, capture, kernel_view

if TYPE_CHECKING:
    from tests.farm.lifecycle.conftest import Supervised

    Supervise = Callable[..., Supervised]


def test_a_silent_engine_is_ended_as_hung_after_it_was_looked_at(supervise: Supervise) -> None:
    run = supervise([{"do": "data", "name": "a", "count": 1}, {"do": "sleep", "s": 60}], stall_s=1)
    end = run.wait()
    assert end["status"] == "hung"
    assert "no sign of progress for" in end["reason"]
    assert end["left"] == []
    told = next(event.data for event in run.of_kind("log") if event.data.get("stacks"))
    assert "state S" in told["stacks"]
    assert "does not listen" in told["stacks"]  # the stand-in is no engine of ours
    assert (run.spool / "stacks.0.log").read_text() in told["stacks"]
    order = [event.kind for event in run.events]
    assert order.index("log") < order.index("engine-exit")
    assert run.of_kind("engine-exit")[0].data["ended_by"] == "supervisor"


def test_an_engine_that_goes_on_is_left_alone_however_long_it_takes(supervise: Supervise) -> None:
    run = supervise([{"do": "data", "name": "a", "count": 8, "gap_s": 0.4}], stall_s=1.5)
    assert run.wait()["status"] == "finished"


def test_each_engine_process_has_the_whole_patience(supervise: Supervise) -> None:
    run = supervise(
        [{"do": "sleep", "s": 1.4}, {"do": "data", "name": "end", "count": 1}],
        stall_s=2.0,
        restarts=[{"at_s": 1.0}],
    )
    assert run.wait()["status"] == "finished"
    assert run.values("end") == [0]


def test_without_a_patience_silence_is_no_fault(supervise: Supervise) -> None:
    run = supervise([{"do": "sleep", "s": 1.5}])
    assert run.wait()["status"] == "finished"


def test_at_the_deadline_too_a_silent_engine_is_looked_at(
    supervise: Supervise,
) -> None:
    run = supervise([{"do": "sleep", "s": 60}], deadline_s=1.5)
    assert run.wait()["status"] == "deadline"
    assert any(event.data.get("stacks") for event in run.of_kind("log"))


def test_a_stopped_process_is_described_by_the_kernel_alone(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from engine import watchdog;"
        "watchdog.answer_to_requests(Path(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
    )
    path = tmp_path / "stacks.log"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        text = capture(process.pid, path)
        assert "state T" in text
        assert "no thread of it can take a signal" in text
        os.kill(process.pid, signal.SIGCONT)
        assert "line 1 in <module>" in capture(process.pid, path)
    finally:
        process.kill()
        process.communicate()


def test_a_busy_thread_is_told_from_one_that_waits() -> None:
    stop = threading.Event()
    # Outside of Python's own lock there is no second busy thread in one process: another process.
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        told = kernel_view(busy.pid)
        assert "state R" in told
        waiting = threading.Thread(target=stop.wait, name="waits")
        waiting.start()
        mine = [line for line in kernel_view(os.getpid()).splitlines() if line.startswith("thread")]
        assert any("0.00 of" in line and "state S" in line for line in mine)
    finally:
        stop.set()
        busy.kill()
        busy.wait()


def test_what_has_ended_meanwhile_is_no_trouble(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert "0 threads" in capture(process.pid, tmp_path / "stacks.log")


def test_a_folder_that_cannot_be_written_leaves_the_engine_deaf_and_going(tmp_path: Path) -> None:
    answer_to_requests(tmp_path / "missing" / "stacks.log")
