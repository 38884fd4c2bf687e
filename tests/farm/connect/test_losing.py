"""Boards that freeze, vanish or come back while something is going on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.boards import virtual
from harness.connect import BoardSession, Watch
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board, Virtual

Connect = Callable[..., BoardSession]
QUICK = Watch(period_s=0.2, limit_s=1.0)


def soon(seconds: float = 30) -> Deadline:
    return Deadline.after(seconds)


def after(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def connection_pids(server) -> list[int]:
    return [pid for pid in server.pids if pid != server.process.pid]


def cut(server) -> None:
    """Ends the server's processes of its connections, not the server."""
    for pid in connection_pids(server):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_frozen_board_is_lost_within_the_watchdogs_time(servers, connect: Connect) -> None:
    server = servers.sshd()
    session = connect(server.board, watch=QUICK)
    after(0.5, lambda: server.signal(signal.SIGSTOP))
    started = time.monotonic()
    with pytest.raises(BoardError, match="answered no keepalive") as caught:
        session.run("sleep 1d", deadline=soon(60))
    assert caught.value.kind == "board-lost"
    assert time.monotonic() - started < 30  # far from the command's own deadline
    assert not session.alive


def test_a_board_frozen_while_idle_is_noticed(servers, connect: Connect) -> None:
    server = servers.sshd()
    session = connect(server.board, watch=QUICK)
    server.signal(signal.SIGSTOP)
    deadline = soon()
    while session.alive and not deadline.expired:
        time.sleep(0.05)
    with pytest.raises(BoardError) as caught:
        session.run("true", deadline=soon())
    assert caught.value.kind == "board-lost"


def test_a_board_frozen_during_a_push_is_lost(servers, connect: Connect, tmp_path: Path) -> None:
    server = servers.sshd()
    session = connect(server.board, watch=QUICK)
    source = tmp_path / "big"
    source.write_bytes(b"x" * 20_000_000)
    with pytest.raises(BoardError) as caught:
        session.push_file(
            source,
            str(tmp_path / "there"),
            deadline=soon(60),
            on_progress=lambda done, _: done > 3_000_000 and server.signal(signal.SIGSTOP),
        )
    assert caught.value.kind == "board-lost"


def test_a_busy_quiet_command_is_not_taken_for_a_frozen_board(servers, connect: Connect) -> None:
    session = connect(servers.sshd().board, watch=Watch(period_s=0.1, limit_s=1.5))
    assert session.run("sleep 4; echo done", deadline=soon()).stdout == b"done\n"


def test_steady_output_counts_as_an_answer(servers, connect: Connect) -> None:
    session = connect(servers.dropbear().board, watch=Watch(period_s=0.1, limit_s=1.0))
    script = "for i in 1 2 3 4 5 6; do head -c 200000 /dev/zero; sleep 0.4; done"
    assert len(session.run(script, deadline=soon()).stdout) == 1_200_000


def test_a_dropped_connection_is_board_lost_at_once(servers, connect: Connect) -> None:
    server = servers.sshd()
    session = connect(server.board)  # with the ordinary, slow watchdog
    after(0.5, lambda: cut(server))
    started = time.monotonic()
    with pytest.raises(BoardError, match="connection was dropped") as caught:
        session.run("sleep 1d", deadline=soon())
    assert caught.value.kind == "board-lost"
    assert time.monotonic() - started < 8


def test_closing_a_session_ends_what_another_thread_waits_for(servers, connect: Connect) -> None:
    session = connect(servers.sshd().board)
    after(0.5, session.close)
    with pytest.raises(BoardError, match="the session was closed here"):
        session.run("sleep 1d", deadline=soon())


def test_closing_is_quick_and_may_be_repeated_on_a_frozen_board(
    servers, connect: Connect, tmp_path: Path
) -> None:
    server = servers.sshd()
    session = connect(server.board)
    session.push_bytes(b"x" * 2_000_000, str(tmp_path / "x"), deadline=soon())
    server.signal(signal.SIGSTOP)
    started = time.monotonic()
    session.close()
    session.close()
    assert time.monotonic() - started < 10


def test_a_deadline_passes_on_a_frozen_board_too(servers, connect: Connect) -> None:
    server = servers.sshd()
    session = connect(server.board)
    server.signal(signal.SIGSTOP)
    for call in (
        lambda: session.run("true", deadline=soon(0.5)),
        lambda: session.read_from("/etc/hostname", 0, 10, deadline=soon(0.5)),
    ):
        with pytest.raises(BoardError) as caught:
            call()
        assert caught.value.kind == "timeout"


@pytest.mark.parametrize("sftp", ["internal-sftp", None])
def test_a_push_goes_on_where_a_lost_link_left_it(
    servers, connect: Connect, tmp_path: Path, sftp: str | None
) -> None:
    server = servers.sshd(sftp=sftp)
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    source.write_bytes(os.urandom(12_000_000))

    def drop(done: int, total: int) -> None:
        if done > 6_000_000:
            cut(server)

    with pytest.raises(BoardError) as caught:
        connect(server.board).push_file(
            source, str(there / "file"), deadline=soon(), on_progress=drop
        )
    assert caught.value.kind == "board-lost"
    partial = next(there.glob("file.*.partial"))
    kept = partial.stat().st_size
    assert kept > 1_000_000
    assert not (there / "file").exists()
    seen: list[int] = []
    connect(server.board).push_file(
        source,
        str(there / "file"),
        deadline=soon(),
        on_progress=lambda done, _: seen.append(done),
    )
    assert seen[0] > kept
    assert (there / "file").read_bytes() == source.read_bytes()
    assert [path.name for path in there.iterdir()] == ["file"]


def test_a_damaged_partial_upload_is_sent_again_whole(
    servers, connect: Connect, tmp_path: Path
) -> None:
    session = connect(servers.sshd().board)
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    source.write_bytes(os.urandom(3_000_000))
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    (there / f"file.{name}.partial").write_bytes(b"not these bytes" * 100)
    session.push_file(source, str(there / "file"), deadline=soon())
    assert (there / "file").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("sftp", ["internal-sftp", None])
def test_a_verified_pull_goes_on_where_a_lost_link_cut_it(
    servers, connect: Connect, tmp_path: Path, sftp: str | None
) -> None:
    board = servers.sshd(sftp=sftp).board
    source, local = tmp_path / "source", tmp_path / "local"
    source.write_bytes(os.urandom(4_000_000))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    size = source.stat().st_size

    def pull(session: BoardSession, cut_at: int) -> list[int]:
        """The offsets that were asked for; the link is cut before the one at `cut_at`."""
        offsets: list[int] = []
        read = session._transfer.read_from

        def read_or_cut(remote: str, offset: int, limit: int, deadline: Deadline) -> bytes:
            if offset >= cut_at:
                session.transport.close()
            offsets.append(offset)
            return read(remote, offset, limit, deadline)

        session._transfer.read_from = read_or_cut  # type: ignore[method-assign]  # to watch it
        session.pull_file(str(source), local, deadline=soon(), limit_bytes=size, sha256=digest)
        return offsets

    with pytest.raises(BoardError):
        pull(connect(board), 2_000_000)
    assert not local.exists()
    assert pull(connect(board), size + 1)[0] >= 2_000_000
    assert local.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("local*")) == ["local"]


def test_a_pull_of_other_content_than_announced_leaves_nothing(
    servers, connect: Connect, tmp_path: Path
) -> None:
    session = connect(servers.sshd().board)
    source, local = tmp_path / "source", tmp_path / "local"
    source.write_bytes(b"x" * 1000)
    with pytest.raises(BoardError, match="arrived with SHA-256") as caught:
        session.pull_file(str(source), local, deadline=soon(), sha256="0" * 64)
    assert caught.value.kind == "transfer"
    assert list(tmp_path.glob("local*")) == []


@pytest.mark.parametrize("sftp", ["internal-sftp", None])
def test_a_push_past_its_deadline_leaves_nothing(
    servers, connect: Connect, tmp_path: Path, sftp: str | None
) -> None:
    session = connect(servers.sshd(sftp=sftp).board)
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    source.write_bytes(b"x" * 20_000_000)
    with pytest.raises(BoardError) as caught:
        session.push_file(
            source,
            str(there / "file"),
            deadline=soon(2),
            on_progress=lambda *_: time.sleep(0.02),
        )
    assert caught.value.kind == "timeout"
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("sftp", [True, False])
def test_a_full_disk_is_told_and_nothing_stays(
    connect: Connect, tmp_path: Path, sftp: bool
) -> None:
    board = Board(name=f"full-{sftp}", virtual=Virtual(full_disk=True, no_sftp=not sftp))
    try:
        session = connect(board, 60)
        home = session.run("pwd", deadline=soon()).stdout.decode().strip()
        source = tmp_path / "source"
        source.write_bytes(os.urandom(80_000_000))
        with pytest.raises(BoardError) as caught:
            session.push_file(source, f"{home}/file", deadline=soon(120))
        assert caught.value.kind == "no-space"
        assert b"partial" not in session.run(["ls", "-a", home], deadline=soon()).stdout
    finally:
        virtual.stop(board)


def test_a_virtual_board_that_freezes_is_lost(connect: Connect) -> None:
    board = Board(name="freezes-1", virtual=Virtual(freeze_after=1.5))
    try:
        session = connect(board, 60, watch=QUICK)
        with pytest.raises(BoardError) as caught:
            session.run("sleep 1d", deadline=soon(60))
        assert caught.value.kind == "board-lost"
    finally:
        virtual.stop(board)
