"""A board in a network of its own that loses packets, delays them, or goes dead without a word."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.connect import BoardSession, Watch, open_session
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board

ADDRESS = "192.0.2.2"
QUICK = Watch(period_s=0.3, limit_s=1.5)


def board_in(net: Any, servers: Any, **options: Any) -> Board:
    """An OpenSSH server there, reachable through the network only."""
    server = net.there.do(lambda: servers.sshd(f"ListenAddress {ADDRESS}", **options))
    return server.board.model_copy(update={"host": ADDRESS})


def open_in(net: Any, board: Board, watch: Watch | None = None) -> BoardSession:
    return net.here.do(lambda: open_session(board, deadline=Deadline.after(60), watch=watch))


@pytest.mark.parametrize("sftp", ["internal-sftp", None])
def test_commands_and_files_are_whole_although_packets_are_lost_and_late(
    network: Callable[..., Any], servers: Any, tmp_path: Path, sftp: str | None
) -> None:
    net = network(loss=0.02, delay_s=0.01)
    session = open_in(net, board_in(net, servers, sftp=sftp), QUICK)
    source, target, back = tmp_path / "source", tmp_path / "target", tmp_path / "back"
    source.write_bytes(os.urandom(1_300_000))
    try:
        script = "head -c 300000 /dev/zero & head -c 300000 /dev/zero >&2; wait; exit 5"
        result = session.run(script, deadline=Deadline.after(60))
        assert (len(result.stdout), len(result.stderr), result.status) == (300_000, 300_000, 5)
        session.push_file(source, str(target), deadline=Deadline.after(60))
        session.pull_file(str(target), back, deadline=Deadline.after(60))
    finally:
        session.close()
    assert back.read_bytes() == source.read_bytes()
    assert net.lost > 0


def test_a_network_that_goes_dead_is_a_lost_board_and_an_upload_goes_on_afterwards(
    network: Callable[..., Any], servers: Any, tmp_path: Path
) -> None:
    net = network(delay_s=0.005)
    board = board_in(net, servers)
    source, folder = tmp_path / "source", tmp_path / "there"
    source.write_bytes(os.urandom(3_000_000))
    folder.mkdir()

    def die(done: int, total: int) -> None:
        net.dead = net.dead or done > 2_000_000

    session = open_in(net, board, QUICK)
    with pytest.raises(BoardError, match="answered no keepalive") as caught:
        session.push_file(
            source, str(folder / "file"), deadline=Deadline.after(60), on_progress=die
        )
    session.close()
    assert caught.value.kind == "board-lost"
    net.dead = False
    began: list[int] = []
    again = open_in(net, board)
    again.push_file(
        source,
        str(folder / "file"),
        deadline=Deadline.after(60),
        on_progress=lambda done, _: began.append(done),
    )
    again.close()
    assert began[0] > 500_000
    assert (folder / "file").read_bytes() == source.read_bytes()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_break_shorter_than_the_watchdogs_patience_costs_nothing(
    network: Callable[..., Any], servers: Any
) -> None:
    net = network(delay_s=0.005)
    session = open_in(net, board_in(net, servers), Watch(period_s=0.3, limit_s=20.0))

    def outage() -> None:
        net.dead = True
        time.sleep(1.5)
        net.dead = False

    threading.Timer(0.3, outage).start()
    script = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.25; done"
    result = session.run(script, deadline=Deadline.after(60))
    session.close()
    assert result.stdout.split() == [b"%d" % number for number in range(1, 9)]
    assert net.lost > 0


def test_a_board_that_is_nowhere_in_its_network_is_unreachable_in_time(
    network: Callable[..., Any], servers: Any
) -> None:
    net = network()
    board = board_in(net, servers)
    net.dead = True

    def connect() -> BoardError:
        with pytest.raises(BoardError) as caught:
            open_session(board, deadline=Deadline.after(3))
        return caught.value

    error = net.here.do(connect)
    assert error.kind == "unreachable"
    assert "no answer from 192.0.2.2" in error.found
