"""Runs on virtual boards: started, followed over lost links, found again, cleaned up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine.records import Event
from harness.boards import virtual
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.jobs import lifecycle

if TYPE_CHECKING:
    from harness.jobs.lifecycle import RunLog
    from tests.farm.lifecycle.conftest import Bench

    MakeBench = Callable[..., Bench]


def numbers(log: RunLog) -> list[int]:
    return [event.n for event in log.events]


def test_a_run_is_started_followed_and_cleaned_away(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=np.arange(3))
    steps = [{"do": "data", "name": "a", "count": 3}, {"do": "array", "name": "L00.x", "n": 9}]
    run = board.start(steps, inputs=inputs)
    seen: list[Event] = []
    log = board.follow(run, tmp_path / "raw", on_event=seen.append)
    assert (log.status, log.reason) == ("finished", "")
    assert log.all_data("a") == [0, 1, 2]
    assert log.data("a") == 2
    assert log.arrays("L00.x")["x"].tolist() == list(range(9))
    assert log.ready is not None
    assert log.ready["job"] == "standin"
    assert log.exits[0]["code"] == 0
    assert seen == log.events
    assert numbers(log) == list(range(len(log.events)))
    assert board.clean_up(run) == []
    assert not Path(run.spool).exists()
    assert board.clean_up(run) == []  # as often as one likes


def test_python_files_in_the_login_folder_are_not_imported(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    board.session()
    for name in ("json", "engine", "signal"):
        package = virtual.board_folder(board.board.name) / "home" / name
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('of the user')\n")
    run = board.start([{"do": "data", "name": "a", "count": 1}])
    assert board.follow(run, tmp_path).status == "finished"
    assert board.clean_up(run) == []


def test_what_the_board_does_not_know_is_refused_by_name(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    log = board.follow(board.start([]), tmp_path)
    with pytest.raises(Exception, match="no data 'absent'"):
        log.data("absent")
    with pytest.raises(Exception, match="no array 'absent'"):
        log.arrays("absent")


def test_a_dropped_link_in_mid_run_loses_no_event(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    run = board.start([{"do": "data", "name": "a", "count": 150, "gap_s": 0.02}])
    dropped = []

    def drop(event: Event) -> None:
        if event.kind == "data" and len(dropped) < 2 and event.data["value"] >= 20:
            dropped.append(event.n)
            assert board.current is not None
            board.current.transport.close()

    log = board.follow(run, tmp_path, on_event=drop)
    assert len(dropped) == 2
    assert board.opened >= 2
    assert log.status == "finished"
    assert log.all_data("a") == list(range(150))
    assert numbers(log) == list(range(len(log.events)))


def test_the_run_outlives_a_link_that_the_board_drops(bench: MakeBench, tmp_path: Path) -> None:
    board = bench(drop_link_at=1.5)
    run = board.start([{"do": "data", "name": "a", "count": 120, "gap_s": 0.02}])
    log = board.follow(run, tmp_path)
    assert board.opened == 2
    assert log.all_data("a") == list(range(120))


FOLLOWER = """
import json, sys
from pathlib import Path
from harness.connect import open_session
from harness.deadline import Deadline
from harness.deploy.push import Deployment
from harness.inventory import Board
from harness.jobs.lifecycle import RemoteRun, follow
name, root, path, run_id, folder = sys.argv[1:]
session = open_session(Board(name=name, virtual={}), deadline=Deadline.after(30))
deployment = Deployment(root, ("python3", "-S", "-s"), {"PYTHONPATH": path}, {})
run = RemoteRun(run_id, f"{root}/runs/{run_id}", deployment)
follow(lambda: session, run, Path(folder), deadline=Deadline.after(60),
       on_event=lambda event: print(event.n, flush=True))
"""


def test_a_run_whose_host_was_killed_is_found_and_collected_whole(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    run = board.start([{"do": "data", "name": "a", "count": 100, "gap_s": 0.03}])
    folder = tmp_path / "raw"
    arguments = [board.board.name, board.deployment.root]
    arguments += [board.deployment.environment["PYTHONPATH"], run.run_id, str(folder)]
    host = subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    for line in host.stdout:
        if int(line) >= 15:
            break
    os.kill(host.pid, signal.SIGKILL)
    host.communicate()
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"v":1,"n":')  # the half line of a process killed while writing
    again = lifecycle.find(board.session(), board.deployment, run.run_id)
    assert again == run
    seen: list[int] = []
    log = board.follow(again, folder, on_event=lambda event: seen.append(event.n))
    assert log.status == "finished"
    assert log.all_data("a") == list(range(100))
    assert seen == numbers(log) == list(range(len(log.events)))
    assert [e["planned"] for e in log.exits] == [False]  # it was not run twice
    assert board.clean_up(run) == []


def test_a_collected_run_needs_no_board_any_more(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    run = board.start([{"do": "array", "name": "x", "n": 2}])
    first = board.follow(run, tmp_path)
    board.clean_up(run)

    def unreachable() -> None:
        raise AssertionError("the board was asked")

    again = lifecycle.follow(unreachable, run, tmp_path, deadline=Deadline.after(5))  # type: ignore[arg-type]  # never called
    assert again == first


def test_a_run_that_was_never_started_is_not_found(bench: MakeBench) -> None:
    board = bench()
    assert lifecycle.find(board.session(), board.deployment, "absent") is None
    with pytest.raises(ValueError, match="run id"):
        lifecycle.find(board.session(), board.deployment, "../etc")


def test_starting_a_run_twice_runs_it_once(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    run = board.start([{"do": "sleep", "s": 1}], run_id="once")
    assert board.start([{"do": "exit", "code": 3}], run_id="once") == run
    log = board.follow(run, tmp_path)
    assert log.status == "finished"
    assert len(log.exits) == 1


def test_cancelling_ends_the_run_on_the_board_and_collects_it(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    run = board.start([{"do": "child"}, {"do": "sleep", "s": 300}])
    supervisor = board.supervisor(run)
    stop = threading.Event()

    def seen(event: Event) -> None:
        if event.kind == "data":
            stop.set()

    log = board.follow(run, tmp_path, on_event=seen, cancel=stop.is_set)
    assert log.status == "cancelled"
    assert log.events[-1].kind == "run-end"
    assert not board.alive(supervisor)
    assert not board.alive(log.data("child"))
    lifecycle.cancel(board.session(), run, Deadline.after(20))  # an ended one: nothing happens


def test_the_hosts_deadline_ends_the_run_on_the_board(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    run = board.start([{"do": "sleep", "s": 300}])
    supervisor = board.supervisor(run)
    log = board.follow(run, tmp_path, deadline=Deadline.after(1.0, "one second"))
    assert log.status == "deadline"
    assert "one second" in log.reason
    assert not board.alive(supervisor)


def test_a_planned_restart_is_collected_as_planned(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    steps = [
        {"do": "array", "name": "x", "n": 3, "attempt": 0},
        {"do": "sleep", "s": 60, "attempt": 0},
        {"do": "array", "name": "x", "n": 5, "attempt": 1},
    ]
    log = board.follow(board.start(steps, restarts=[{"at_s": 1.5}]), tmp_path)
    assert log.status == "finished"
    assert [(e["attempt"], e["planned"]) for e in log.exits] == [(0, True), (1, False)]
    assert len(log.arrays("x")["x"]) == 5  # what the second engine wrote over the first's


def test_a_killed_supervisor_is_a_lost_run_with_its_evidence(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    steps = [
        {"do": "print", "text": "about to go\n"},
        {"do": "sleep", "s": 0.5},
        {"do": "kill-supervisor"},
    ]
    run = board.start(steps)
    log = board.follow(run, tmp_path)
    assert log.status == "lost"
    assert "told no end" in log.reason
    assert "the engine held" in log.reason
    assert "about to go" in log.reason
    assert (tmp_path / "engine.0.log").read_text() == "about to go\n"
    assert board.clean_up(run) == []


def test_an_engine_crash_brings_its_log_to_the_host(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    steps = [{"do": "print", "text": "last words\n"}, {"do": "kill", "signal": "SIGSEGV"}]
    log = board.follow(board.start(steps), tmp_path)
    assert log.status == "failed"
    assert "SIGSEGV" in log.reason
    assert "last words" in (tmp_path / "engine.0.log").read_text()
    assert "Segmentation fault" in (tmp_path / "engine.0.log").read_text()  # from faulthandler


def test_cleaning_up_ends_what_ignores_requests_and_what_left_the_group(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    steps = [{"do": "ignore-term"}, {"do": "child"}, {"do": "sleep", "s": 300}]
    run = board.start(steps)
    events = Path(run.spool) / "events.jsonl"
    board.until(lambda: b'"child"' in events.read_bytes(), "the child's pid")
    records = [json.loads(line) for line in events.read_bytes().splitlines()]
    child = next(r["data"]["value"] for r in records if r["data"].get("name") == "child")
    os.kill(board.supervisor(run), signal.SIGSTOP)  # nor does the supervisor answer
    assert board.clean_up(run) == []
    assert not board.alive(child)
    assert not Path(run.spool).exists()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"v":1,"n":7,"t_ns":1,"kind":"log","data":{}}\n', "event number 7"),
        (b'{"v":2,"n":1,"t_ns":1,"kind":"log","data":{}}\n', "version 2"),
        (b"not json at all\n", "not JSON"),
        (b'{"v":1,"n":1,"t_ns":1,"kind":"secret","data":{}}\n', "unknown kind"),
        (b"x" * (2 << 20), "line of more than"),
        (
            b'{"v":1,"n":1,"t_ns":1,"kind":"array","data":{"name":"../../x","file":"../../x",'
            b'"sha256":"' + b"0" * 64 + b'","bytes":1}}\n',
            "array name",
        ),
        (
            b'{"v":1,"n":1,"t_ns":1,"kind":"array","data":{"name":"x","file":"/etc/passwd",'
            b'"sha256":"' + b"0" * 64 + b'","bytes":1}}\n',
            "'/etc/passwd'",
        ),
    ],
)
def test_a_hostile_spool_is_refused(
    bench: MakeBench, tmp_path: Path, line: bytes, complaint: str
) -> None:
    board = bench()
    run = board.start([{"do": "sleep", "s": 300}], run_id="hostile")
    spool = Path(run.spool)
    board.until(lambda: (spool / "events.jsonl").read_bytes().count(b"\n") >= 1, "a first event")
    first = (spool / "events.jsonl").read_bytes().split(b"\n")[0]
    (spool / "events.jsonl").unlink()  # the supervisor goes on writing where nobody looks
    (spool / "events.jsonl").write_bytes(first + b"\n" + line)
    with pytest.raises(BoardError) as caught:
        board.follow(run, tmp_path)
    assert caught.value.kind == "protocol"
    assert complaint in str(caught.value)
    board.clean_up(run)


def test_an_array_that_differs_from_its_hash_is_refused(bench: MakeBench, tmp_path: Path) -> None:
    board = bench()
    data = {"name": "x", "file": "arrays/x.npz", "sha256": "0" * 64, "bytes": 10}
    steps = [{"do": "array", "name": "x", "n": 1}, {"do": "announce", "data": data}]
    with pytest.raises(BoardError) as caught:
        board.follow(board.start(steps), tmp_path)
    assert caught.value.kind == "protocol"
    assert not (tmp_path / "arrays" / "x.npz").exists()


def test_an_engine_that_does_not_start_is_told_with_its_own_words(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    empty = {"PYTHONPATH": str(tmp_path)}
    board.deployment = type(board.deployment)(
        board.deployment.root, board.deployment.python, empty, {}
    )
    with pytest.raises(BoardError, match="No module named engine") as caught:
        board.start([])
    assert caught.value.kind == "engine"
    assert list((Path(board.deployment.root) / "runs").iterdir()) == []


def test_a_noisy_shell_and_a_link_without_sftp_change_nothing(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench(noisy_shell=True, no_sftp=True)
    run = board.start(
        [{"do": "data", "name": "a", "count": 3}, {"do": "array", "name": "x", "n": 4}]
    )
    log = board.follow(run, tmp_path)
    assert log.status == "finished"
    assert log.all_data("a") == [0, 1, 2]
    assert len(log.arrays("x")["x"]) == 4
    assert board.clean_up(run) == []
