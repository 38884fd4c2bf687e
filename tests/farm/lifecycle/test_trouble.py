"""Boards that are lost, restarted, slow or short of memory in the middle of a run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.records import Event
from harness.boards import virtual
from harness.connect import BoardSession, CommandResult
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.jobs import following, lifecycle
from harness.jobs.lifecycle import RemoteRun

if TYPE_CHECKING:
    from tests.farm.lifecycle.conftest import Bench

    MakeBench = Callable[..., Bench]


def test_a_reboot_is_told_from_a_crash_by_the_boot_id(bench: MakeBench, tmp_path: Path) -> None:
    board = bench(reboot_at=3600)
    run = board.start([{"do": "sleep", "s": 60}])
    virtual.provoke(board.board.name)
    log = board.follow(run, tmp_path)
    assert log.status == "board-reset"
    assert "boot_id was" in log.reason


def test_a_board_that_is_gone_for_good_is_lost_when_patience_ends(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_PAUSE_S", (0.01, 0.05))
    board = bench()
    run = board.start([{"do": "sleep", "s": 300}])
    supervisor = board.supervisor(run)
    tries = []

    def refused() -> BoardSession:
        tries.append(1)
        raise BoardError(board.board.name, "unreachable", "connection refused")

    with pytest.raises(BoardError, match="connection refused") as caught:
        lifecycle.follow(refused, run, tmp_path, deadline=Deadline.after(30), reconnect_s=0.5)
    assert caught.value.kind == "board-lost"
    assert len(tries) > 1
    assert board.alive(supervisor)  # the run is not harmed by it
    assert board.clean_up(run) == []
    assert not board.alive(supervisor)


@pytest.mark.parametrize("asked", [False, True])
def test_neither_patience_nor_a_wish_to_stop_waits_for_a_connection_that_hangs(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(following, "LAST_TRY_S", 0.2)
    run = RemoteRun("r", "/nowhere", bench().deployment)
    dialled, released = [], threading.Event()

    def hangs() -> BoardSession:
        dialled.append(1)
        released.wait(60)
        raise BoardError("b", "unreachable", "too late")

    try:
        with pytest.raises(BoardError) as caught:
            lifecycle.follow(
                hangs,
                run,
                tmp_path,
                deadline=Deadline.after(60),
                cancel=lambda: asked,
                reconnect_s=60 if asked else 0.3,
            )
    finally:
        released.set()
    assert caught.value.kind == "board-lost"
    assert len(dialled) == 1


def test_a_cancelled_run_that_goes_on_is_given_up_at_once(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "CANCEL_S", 0.3)
    board = bench()
    run = board.start([{"do": "sleep", "s": 300}])
    os.kill(board.supervisor(run), signal.SIGSTOP)
    with pytest.raises(BoardError, match="asked to end and goes on") as caught:
        board.follow(run, tmp_path, cancel=lambda: True)
    assert caught.value.kind == "timeout"
    assert board.clean_up(run) == []


class Troubled:
    """A session whose looks at the spool go wrong in given ways before they work."""

    def __init__(self, session: BoardSession, troubles: list[CommandResult | BoardError]) -> None:
        self._session, self.troubles = session, troubles

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, command: Any, **options: Any) -> CommandResult:
        if not self.troubles or not isinstance(command, str) or "supervisor.json" not in command:
            return self._session.run(command, **options)
        trouble = self.troubles.pop(0)
        if isinstance(trouble, BoardError):
            raise trouble
        return trouble


def test_a_board_too_short_of_memory_to_answer_does_not_end_a_healthy_run(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_PAUSE_S", (0.01, 0.05))
    board = bench()
    run = board.start([{"do": "data", "name": "a", "count": 3}])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    session = Troubled(
        board.session(),
        [
            CommandResult(2, b"", b"sh: can't fork: Cannot allocate memory", 0.0),
            BoardError("b", "protocol", "the shell on the board was killed"),
            CommandResult(0, f"{boot} dead {boot}\n".encode(), b"tail: can't fork", 0.0),
            BoardError("b", "timeout", "no channel was opened in time"),
        ],
    )
    log = lifecycle.follow(
        lambda: session,  # type: ignore[arg-type,return-value]  # all that is used of one
        run,
        tmp_path,
        deadline=Deadline.after(60),
    )
    assert session.troubles == []
    assert log.status == "finished"
    assert log.all_data("a") == [0, 1, 2]


def test_trouble_that_stays_is_a_lost_board_and_no_broken_protocol(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_PAUSE_S", (0.01, 0.05))
    board = bench()
    run = board.start([{"do": "sleep", "s": 300}])
    failed = CommandResult(2, b"", b"sh: can't fork", 0.0)
    session = Troubled(board.session(), [failed] * 10_000)
    with pytest.raises(BoardError, match="can't fork") as caught:
        lifecycle.follow(
            lambda: session,  # type: ignore[arg-type,return-value]  # all that is used of one
            run,
            tmp_path,
            deadline=Deadline.after(60),
            reconnect_s=0.3,
        )
    assert caught.value.kind == "board-lost"
    board.clean_up(run)


def test_a_slow_line_is_asked_for_smaller_pieces_after_a_timeout(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_PAUSE_S", (0.01, 0.05))
    monkeypatch.setattr(following, "LEAST_POLL_BYTES", 256)
    board = bench()
    run = board.start([{"do": "data", "name": "a", "count": 50, "pad": "x" * 2000}])
    events = Path(run.spool) / "events.jsonl"
    board.until(lambda: b"run-end" in events.read_bytes(), "the end of the run")
    slow = BoardError(board.board.name, "timeout", "did not end in time")
    session = Troubled(board.session(), [slow] * 10)
    asked: list[int] = []
    run_once = session.run

    def run_and_note(command: Any, **options: Any) -> CommandResult:
        if isinstance(command, str) and "head -c" in command:
            asked.append(int(command.split("head -c")[1]))
        return run_once(command, **options)

    monkeypatch.setattr(session, "run", run_and_note)
    log = lifecycle.follow(
        lambda: session,  # type: ignore[arg-type,return-value]  # all that is used of one
        run,
        tmp_path,
        deadline=Deadline.after(60),
    )
    assert asked[:3] == [4 << 20, 2 << 20, 1 << 20]
    assert asked[-1] == 4096
    assert log.all_data("a") == list(range(50))


def ended(run_id: str, boot: str, *more: bytes) -> bytes:
    """Events of a run that was begun in the boot `boot`."""
    data = {"run_id": run_id, "boot_id": boot, "job": "standin"}
    return b"".join([Event(0, 1, "run-start", data).to_line(), *more])


CANCELLED = Event(
    1, 2, "run-end", {"status": "cancelled", "reason": "SIGTERM to the supervisor", "left": []}
).to_line()
OTHER_BOOT = "00000000-0000-4000-8000-000000000000"


def crafted(board: Bench, run_id: str, events: bytes, boot: str) -> RemoteRun:
    """A spool as a board may hold it after a restart."""
    spool = Path(board.deployment.root) / "runs" / run_id
    spool.mkdir(parents=True)
    (spool / "events.jsonl").write_bytes(events)
    record = {"boot_id": boot, "pid": 2**22 + 1, "start_ticks": 5}
    (spool / "supervisor.json").write_text(json.dumps(record, indent=1, sort_keys=True))
    return RemoteRun(run_id, str(spool), board.deployment)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (CANCELLED, "SIGTERM to the supervisor"),
        (b"", "told no end"),
        (b"\0" * 5000 + b"\n\0\0", "cannot be read"),
        (b'{"v":1,"n":1,"t_n', "told no end"),
    ],
    ids=["orderly", "at once", "garbage", "half a line"],
)
def test_a_restart_of_the_board_is_told_as_one_however_it_ended_the_run(
    bench: MakeBench, tmp_path: Path, tail: bytes, said: str
) -> None:
    board = bench()
    run = crafted(board, "r", ended("r", OTHER_BOOT, tail), OTHER_BOOT)
    log = board.follow(run, tmp_path)
    assert log.status == "board-reset"
    assert OTHER_BOOT in log.reason
    assert said in log.reason


def test_a_restart_is_known_when_not_even_the_first_event_is_left(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    log = board.follow(crafted(board, "r", b"\0" * 300 + b"\n", OTHER_BOOT), tmp_path)
    assert log.status == "board-reset"


def test_a_spool_in_memory_that_a_restart_took_is_a_restart(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    data = {"name": "x", "file": "arrays/x.npz", "sha256": "0" * 64, "bytes": 10}
    array = Event(1, 2, "array", data).to_line()
    (tmp_path / "events.jsonl").write_bytes(ended("r", OTHER_BOOT, array))  # copied before
    board.session()
    run = RemoteRun("r", f"{board.deployment.root}/runs/r", board.deployment)
    log = board.follow(run, tmp_path)
    assert log.status == "board-reset"
    assert "not on the board any more" in log.reason


def test_arrays_that_a_restart_damaged_are_a_restart(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_PAUSE_S", (0.01, 0.05))
    board = bench()
    data = {"name": "x", "file": "arrays/x.npz", "sha256": "0" * 64, "bytes": 10}
    array = Event(1, 2, "array", data).to_line()
    end = Event(2, 3, "run-end", {"status": "finished", "reason": "", "left": []}).to_line()
    log = board.follow(
        crafted(board, "r", ended("r", OTHER_BOOT, array, end), OTHER_BOOT), tmp_path
    )
    assert log.status == "board-reset"


def test_a_run_that_something_else_cancelled_is_lost_and_not_the_users_wish(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench()
    run = board.start([{"do": "sleep", "s": 300}])
    os.kill(board.supervisor(run), signal.SIGTERM)
    log = board.follow(run, tmp_path)
    assert log.status == "lost"
    assert "something else" in log.reason
    assert "SIGTERM" in log.reason
