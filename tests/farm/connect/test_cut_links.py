"""A link that is cut at a byte of an upload: what is there is kept, and nothing is half there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.boards import virtual
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board

SIZE = 2_500_000
# Of all that an upload sends: while connecting, in the file, in its last bytes, after them.
CUTS = (0.0004, 0.6, 0.995, 0.9995)


@pytest.fixture(params=["openssh", "openssh without sftp", "virtual"])
def board(request: pytest.FixtureRequest, servers: Any) -> Iterator[Board]:
    kind: str = request.param
    if kind != "virtual":
        yield servers.sshd(sftp=None if "without" in kind else "internal-sftp").board
        return
    made = Board.model_validate({"name": "cut-1", "virtual": {}})
    endpoint = virtual.ensure_running(made)
    yield Board.model_validate({"name": "cut-1", **vars(endpoint)})
    virtual.stop(made)


def upload(board: Board, source: Path, target: Path) -> None:
    with open_session(board, deadline=Deadline.after(30)) as session:
        session.push_file(source, str(target), deadline=Deadline.after(60))


def test_wherever_the_link_is_cut_an_upload_ends_whole_and_leaves_no_part(
    board: Board, relay: Callable[..., Any], tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "there"
    source.write_bytes(os.urandom(SIZE))
    folder.mkdir()
    way = relay(board)
    upload(way.board(board), source, folder / "whole")
    everything = way.carried
    for number, share in enumerate(CUTS):
        target = folder / f"file-{number}"
        way.cut_after(int(share * everything))
        lost = None
        try:
            upload(way.board(board), source, target)
        except BoardError as error:
            lost = error.kind
        # While connecting it is tried again by itself; after the last byte there is nothing to do.
        assert lost == "board-lost" or (lost is None and not 0.01 < share < 0.999)
        # How much of what had arrived is kept is the server's affair: it may end at once.
        kept = sum(part.stat().st_size for part in folder.glob(f"file-{number}.*.partial"))
        before = way.carried
        upload(way.board(board), source, target)
        assert target.read_bytes() == source.read_bytes()
        # What is kept is not sent again.
        assert way.carried - before < everything - kept + 100_000
        assert list(folder.glob("*.partial")) == []


def test_a_virtual_board_cuts_the_link_once_at_its_byte(tmp_path: Path) -> None:
    board = Board.model_validate({"name": "cut-2", "virtual": {"drop_link_at_byte": 1_000_000}})
    home = virtual.board_folder("cut-2") / "home"
    source = tmp_path / "source"
    source.write_bytes(os.urandom(SIZE))
    try:
        virtual.ensure_running(board)
        with pytest.raises(BoardError) as caught:
            upload(board, source, home / "file")
        assert caught.value.kind == "board-lost"
        (part,) = home.glob("file.*.partial")
        assert 500_000 < part.stat().st_size < 1_000_000
        upload(board, source, home / "file")
        assert (home / "file").read_bytes() == source.read_bytes()
        assert list(home.glob("*.partial")) == []
    finally:
        virtual.stop(board)


def test_half_of_a_script_that_the_link_cut_is_not_run(
    servers: Any, relay: Callable[..., Any], connect: Callable[..., BoardSession], tmp_path: Path
) -> None:
    server, mark = servers.sshd(), tmp_path / "ran"
    way = relay(server.board)
    session = connect(way.board(server.board))
    way.cut_after(90_000)
    with pytest.raises(BoardError) as caught:
        session.run(f"echo half >{mark}\n: {'x' * 150_000}", deadline=Deadline.after(20))
    assert caught.value.kind == "board-lost"
    deadline = Deadline.after(20)
    while len(server.pids) > 1 and not deadline.expired:  # until its shell has ended
        time.sleep(0.02)
    assert not mark.exists()
    whole = connect(server.board).run(f"echo whole >{mark}", deadline=Deadline.after(20))
    assert (whole.status, mark.read_text()) == (0, "whole\n")
