"""The life of a virtual board: started once, found again, restarted when it changed, ended."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest

from harness.boards import virtual
from harness.boards.virtual import home as home_module
from harness.boards.virtual import processes
from harness.boards.virtual.options import Options
from harness.boards.virtual.state import State
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board, Virtual
from tests.farm.detached import detached

Client = Callable[..., paramiko.SSHClient]
Make = Callable[..., Board]

STARTER = """
import sys, time
from harness.boards import virtual
from harness.inventory import Board
board = Board.model_validate({"name": "virt", "virtual": {}})
print(virtual.ensure_running(board).port, flush=True)
time.sleep(300)
"""


def pid_of(name: str = "virt") -> int:
    return next(state.pid for state in virtual.running() if state.name == name)


def test_a_running_board_is_used_again(make_board: Make) -> None:
    first = virtual.ensure_running(make_board())
    pid = pid_of()
    assert virtual.ensure_running(make_board()) == first
    assert pid_of() == pid


def test_a_board_outlives_a_killed_starter_and_is_found_by_the_next(make_board: Make) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    port = int(starter.stdout.readline())
    pid = pid_of()
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert virtual.ensure_running(make_board()).port == port
    assert pid_of() == pid


def test_two_callers_at_once_start_one_board(make_board: Make) -> None:
    together = threading.Barrier(4)

    def start() -> virtual.Endpoint:
        together.wait()
        return virtual.ensure_running(make_board())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        endpoints = {future.result() for future in [pool.submit(start) for _ in range(4)]}
    assert len(endpoints) == 1
    assert len(virtual.running()) == 1


def test_other_options_restart_the_board_with_the_same_keys_and_home(
    make_board: Make, home: Path
) -> None:
    first = virtual.ensure_running(make_board())
    pid = pid_of()
    (home / "boards/virt/home/kept").write_text("here")
    second = virtual.ensure_running(make_board(cpus=1))
    assert pid_of() != pid
    assert processes.start_of(pid) is None
    assert second.host_key == first.host_key
    assert (home / "boards/virt/home/kept").read_text() == "here"


def test_the_state_of_a_dead_server_is_not_believed_even_if_its_pid_lives_again(
    make_board: Make, home: Path
) -> None:
    virtual.ensure_running(make_board())
    folder = home / "boards/virt"
    state = State.read(folder)
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    while state.alive:
        time.sleep(0.01)
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace(str(state.pid), str(os.getpid())))
    assert virtual.running() == []
    virtual.ensure_running(make_board())
    assert pid_of() not in (state.pid, os.getpid())


def test_a_damaged_state_file_is_as_none(make_board: Make, home: Path) -> None:
    (home / "boards/virt").mkdir(parents=True)
    (home / "boards/virt/state.json").write_text('{"format": 1, "pid"')
    assert virtual.ensure_running(make_board()).port > 0


def test_stop_ends_the_board_with_everything_on_it_and_may_be_repeated(
    plain_client: Client,
) -> None:
    _, out, _ = plain_client().exec_command(detached("exec sleep 300"))
    out.channel.recv_exit_status()
    left = processes.descendants(pid_of())
    assert left
    assert virtual.stop("virt")
    assert all(processes.start_of(item.pid) is None for item in left)
    assert not virtual.stop("virt")


def test_a_process_knows_which_live_boards_it_started(make_board: Make) -> None:
    virtual.ensure_running(make_board("one"))
    virtual.ensure_running(make_board("two"))
    assert sorted(virtual.started_here()) == ["one", "two"]
    assert virtual.stop("one")
    assert virtual.started_here() == ["two"]


def test_a_board_whose_state_file_is_gone_is_ended_by_who_started_it(
    make_board: Make, home: Path
) -> None:
    virtual.ensure_running(make_board())
    pid = pid_of()
    (home / "boards/virt/state.json").unlink()
    assert virtual.stop("virt")
    assert processes.start_of(pid) is None
    assert virtual.started_here() == []


def test_an_idle_board_ends_by_itself(make_board: Make, home: Path) -> None:
    virtual.ensure_running(make_board(), idle_s=0.5)
    pid = pid_of()
    end = time.monotonic() + 20
    while processes.start_of(pid) is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert processes.start_of(pid) is None
    assert not (home / "boards/virt/state.json").exists()


def test_a_board_with_a_process_left_on_it_is_not_idle(make_board: Make) -> None:
    endpoint = virtual.ensure_running(make_board(), idle_s=0.5)
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
    client.connect(endpoint.host, endpoint.port, endpoint.user, key_filename=str(endpoint.key_file))
    _, out, _ = client.exec_command(detached("exec sleep 4"))
    out.channel.recv_exit_status()
    client.close()
    time.sleep(2)
    assert len(virtual.running()) == 1


def test_a_board_whose_state_folder_was_deleted_ends_by_itself(
    make_board: Make, home: Path
) -> None:
    virtual.ensure_running(make_board())
    pid = pid_of()
    shutil.rmtree(home / "boards")
    end = time.monotonic() + 20
    while processes.start_of(pid) is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert processes.start_of(pid) is None


def test_the_folder_of_a_board_is_private(make_board: Make, home: Path) -> None:
    endpoint = virtual.ensure_running(make_board())
    assert stat.S_IMODE((home / "boards/virt").stat().st_mode) == 0o700
    assert stat.S_IMODE(endpoint.key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "boards/virt/host_key").stat().st_mode) == 0o600


def test_a_board_that_cannot_start_tells_the_end_of_its_log(
    make_board: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = make_board()
    virtual.ensure_running(board)
    virtual.stop(board)
    (home / "boards/virt/host_key").write_text("not a key")
    with pytest.raises(BoardError, match=r"ended at its start .*[Kk]ey") as caught:
        virtual.ensure_running(board)
    assert caught.value.kind == "unreachable"


def test_a_missing_login_shell_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_module, "SYSTEM_PATH", ("/nonexistent",))
    with pytest.raises(home_module.MissingShell, match="no fish in /nonexistent"):
        home_module.login_shell(Options(shell="fish"))


def test_every_option_of_the_inventory_reaches_the_board() -> None:
    derived = {"own_boot_id"}  # of a board whose power is switched
    assert set(Virtual.model_fields) | derived == set(Options.__dataclass_fields__)
    shown = Virtual(isa=("cortex-a76",), cpus=1)
    options = Options.of(shown.model_dump())
    assert (options.isa, options.cpus) == (("cortex-a76",), 1)
    assert Options.from_json(options.to_json()) == options
    assert Options.of(Virtual().model_dump()) == Options()


def test_starting_has_a_deadline(make_board: Make) -> None:
    with pytest.raises(BoardError) as caught:
        virtual.ensure_running(make_board(), deadline=Deadline.after(0.0))
    assert caught.value.kind == "timeout"
    assert virtual.running() == []
