"""The supervisor with real processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.farm.lifecycle.conftest import Supervised

    Supervise = Callable[..., Supervised]


def test_a_run_is_told_from_start_to_end_without_gaps(supervise: Supervise) -> None:
    run = supervise([{"do": "data", "name": "a", "count": 3}, {"do": "array", "name": "x", "n": 4}])
    assert run.wait() == {"status": "finished", "reason": "", "left": []}
    assert [event.n for event in run.events] == list(range(len(run.events)))
    kinds = [event.kind for event in run.events if event.kind != "sample"]
    assert kinds[:3] == ["run-start", "engine-start", "ready"]
    assert kinds[3:] == ["data", "data", "data", "array", "engine-exit", "run-end"]
    assert run.of_kind("engine-exit")[0].data["code"] == 0
    assert (run.spool / run.of_kind("array")[0].data["file"]).is_file()
    assert run.process.returncode == 0


def test_an_engine_is_sampled_while_it_lives(supervise: Supervise) -> None:
    run = supervise([{"do": "sleep", "s": 1.0}])
    run.wait()
    samples = [event.data for event in run.of_kind("sample")]
    assert len(samples) >= 4
    sizes = [sample["rss_mb"] for sample in samples if "rss_mb" in sample]
    assert len(sizes) >= 3
    assert all(0 < size < 1000 for size in sizes)
    assert "cpu_percent" in samples[-1]


def test_a_garbled_line_and_a_line_cut_by_death_cost_only_themselves(supervise: Supervise) -> None:
    run = supervise(
        [
            {"do": "raw", "text": 'no json\n{"kind":"run-end","data":{}}\n'},
            {"do": "data", "name": "after", "count": 1},
            {"do": "raw", "text": '{"kind":"data","data":{"name":"cu'},
            {"do": "kill", "signal": "SIGKILL"},
        ]
    )
    assert run.wait()["status"] == "failed"
    assert run.values("after") == [0]
    said = " / ".join(event.data["message"] for event in run.of_kind("log"))
    assert "not JSON" in said
    assert "'run-end'" in said  # the engine may not tell the end
    assert "ended within an event line" in said


def test_a_line_without_end_is_dropped_and_the_next_one_kept(supervise: Supervise) -> None:
    run = supervise(
        [
            {"do": "data", "name": "huge", "count": 1, "pad": "x" * 1000},
            *[{"do": "raw", "text": "y" * 60000}] * 20,
            {"do": "raw", "text": "\n"},
            {"do": "data", "name": "after", "count": 2},
        ]
    )
    assert run.wait()["status"] == "finished"
    assert run.values("after") == [0, 1]
    assert "1200000 bytes was dropped" in run.of_kind("log")[0].data["message"]


def test_a_crash_fails_the_run_and_names_the_signal_and_the_last_error(
    supervise: Supervise,
) -> None:
    error = {"kind": "NonFinite", "message": "NaN in L03.attn.out", "step": 4}
    run = supervise([{"do": "error", "data": error}, {"do": "kill", "signal": "SIGSEGV"}])
    end = run.wait()
    assert end["status"] == "failed"
    assert "SIGSEGV" in end["reason"]
    assert "NaN in L03.attn.out" in end["reason"]
    exit_ = run.of_kind("engine-exit")[0].data
    assert exit_["signal"] == "SIGSEGV"
    assert exit_["planned"] is False
    assert exit_["rusage"]["max_rss_mb"] > 1
    assert "Segmentation fault" not in end["reason"]


def test_a_planned_restart_is_told_as_planned_and_the_run_goes_on(supervise: Supervise) -> None:
    run = supervise(
        [
            {"do": "data", "name": "alive", "count": 1},
            {"do": "sleep", "s": 30, "attempt": 0},
            {"do": "data", "name": "again", "count": 1, "attempt": 1},
        ],
        restarts=[{"at_s": 0.8, "reason": "stress"}],
    )
    assert run.wait()["status"] == "finished"
    first, second = (event.data for event in run.of_kind("engine-exit"))
    assert first["planned"] is True
    assert first["signal"] == "SIGKILL"
    assert first["reason"] == "stress"
    assert (second["planned"], second["code"], second["attempt"]) == (False, 0, 1)
    assert run.values("again") == [0]


def test_an_engine_that_ignores_a_restart_is_killed(supervise: Supervise) -> None:
    run = supervise(
        [{"do": "ignore-term"}, {"do": "sleep", "s": 30, "attempt": 0}],
        restarts=[{"at_s": 0.5, "signal": "SIGTERM"}],
    )
    assert run.wait()["status"] == "finished"
    assert run.of_kind("engine-exit")[0].data["signal"] == "SIGKILL"


def test_the_deadline_ends_an_engine_that_ignores_requests(supervise: Supervise) -> None:
    run = supervise([{"do": "ignore-term"}, {"do": "sleep", "s": 60}], deadline_s=0.7)
    end = run.wait()
    assert end["status"] == "deadline"
    assert "0.7 s" in end["reason"]
    assert run.process.returncode == 1


def test_an_engine_that_says_too_much_is_ended_and_its_exit_says_by_whom(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_EVENTS_LIMIT", "20000")
    run = supervise(
        [{"do": "data", "name": "a", "count": 30, "pad": "x" * 1000}, {"do": "sleep", "s": 60}]
    )
    end = run.wait()
    assert end["status"] == "failed"
    assert "of events" in end["reason"]
    exit_ = run.of_kind("engine-exit")[0].data
    assert exit_["signal"] == "SIGTERM"
    assert (exit_["planned"], exit_["ended_by"]) == (False, "supervisor")
    assert end["reason"] in exit_["reason"]


def test_cancelling_leaves_no_process_not_even_one_that_left_the_group(
    supervise: Supervise,
) -> None:
    run = supervise([{"do": "ignore-term"}, {"do": "child"}, {"do": "sleep", "s": 60}])
    child = run.until(lambda: run.values("child"), "the child's pid")[0]
    engine = run.of_kind("engine-start")[0].data["pid"]
    os.kill(run.process.pid, signal.SIGTERM)
    end = run.wait()
    assert end["status"] == "cancelled"
    assert "SIGTERM" in end["reason"]
    assert end["left"] == []
    assert not run.alive(child)
    assert not run.alive(engine)


def test_a_killed_supervisor_takes_its_engine_with_it(supervise: Supervise) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("PR_SET_PDEATHSIG is Linux's")
    run = supervise([{"do": "sleep", "s": 60}])
    run.until(lambda: run.of_kind("ready"), "ready")
    engine = run.of_kind("engine-start")[0].data["pid"]
    run.process.kill()
    run.process.wait()
    run.until(lambda: not run.alive(engine), "the engine's end")
    assert run.events[-1].kind != "run-end"


def test_a_flood_of_output_is_capped_and_does_not_hold_the_engine_up(supervise: Supervise) -> None:
    run = supervise(
        [
            {"do": "print", "text": "begin\n"},
            {"do": "print", "text": "noise " * 1000 + "\n", "count": 2000},
            {"do": "print", "text": "end\n"},
        ]
    )
    assert run.wait()["status"] == "finished"
    log = (run.spool / "engine.0.log").read_text()
    assert len(log) <= 2 << 20
    assert log.startswith("begin\n")
    assert log.endswith("end\n")
    assert "bytes left out" in log


def test_a_detached_supervisor_prints_its_pid_and_holds_no_stream_of_its_caller(
    supervise: Supervise,
) -> None:
    run = supervise([{"do": "sleep", "s": 60}], "--detach")
    said, _ = run.process.communicate(timeout=20)  # ends only when nobody holds the pipe
    assert run.process.returncode == 0
    record = json.loads((run.spool / "supervisor.json").read_text())
    assert int(said) == record["pid"] == record["pgid"] != run.process.pid
    assert run.alive(record["pid"])
    streams = {str(Path(f"/proc/{record['pid']}/fd/{fd}").readlink()) for fd in range(3)}
    assert streams == {"/dev/null", str(run.spool / "supervisor.log")}
    os.kill(record["pid"], signal.SIGTERM)
    run.until(lambda: run.of_kind("run-end"), "the end of the run")
    assert run.of_kind("run-end")[0].data["status"] == "cancelled"


def test_a_spool_tells_one_run_only(supervise: Supervise) -> None:
    run = supervise([])
    run.wait()
    again = subprocess.run(
        [sys.executable, "-m", "engine", "run", run.spool / "spec.json", "--spool", run.spool],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode != 0
    assert "already tells a run" in again.stderr
    assert run.of_kind("run-end")[0].data["status"] == "finished"


def test_a_spec_of_another_version_is_refused_by_name(supervise: Supervise) -> None:
    run = supervise([], version=99)
    run.process.wait(timeout=20)
    assert run.process.returncode == 2
    assert run.events == []
