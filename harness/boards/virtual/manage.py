"""Starts, finds and stops virtual boards from the host's side.

A board outlives whoever started it: the next command, or the next process, finds it by its state
file and uses it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh

from harness.boards.virtual import processes
from harness.boards.virtual.home import PASSED_ON, SYSTEM_PATH
from harness.boards.virtual.options import Options
from harness.boards.virtual.state import CLIENT_KEY, HOST_KEY, LOCK, LOG, OFF, STATE, State
from harness.boards.virtual.userland import NoUserland, userland
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board
from harness.paths import existing_state_dir, made_folder, state_dir

START_SECONDS = 30.0
STOP_SECONDS = 10.0
IDLE_SECONDS = 900.0
EXIT_UNSUPPORTED = 3  # of __main__
LOG_LIMIT = 1 << 20  # a log beyond this many bytes is begun anew at the next start

# Boards that this process started, so that it can wait for them when they end: a child that nobody
# waits for stays a zombie.
_started: dict[Path, subprocess.Popen[bytes]] = {}


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where a virtual board answers. `host_key` is its fingerprint, `SHA256:…`."""

    host: str
    port: int
    host_key: str
    key_file: Path
    user: str


def board_folder(name: str) -> Path:
    """Made on demand, mode 0700. `name` is checked by the inventory's schema."""
    folder = made_folder(state_dir() / "boards" / name, "HARNESS_HOME")
    folder.chmod(0o700)
    return folder


def ensure_running(
    board: Board, *, deadline: Deadline | None = None, idle_s: float = IDLE_SECONDS
) -> Endpoint:
    """The running board of that name and those options; started, or restarted, where needed.

    Two callers at once start one board. The first emulated one on a machine may take longer than
    the deadline: its programs are fetched. Raises BoardError (unreachable) when this machine cannot
    be that board, when it is switched off, or when it does not start by the deadline, saying what
    its log ends with.
    """
    if board.virtual is None:
        raise ValueError(f"board {board.name} is not virtual")
    _refuse_unsupported(board)
    deadline = deadline or Deadline.after(START_SECONDS, "start of the virtual board")
    options = _options(board)
    root = _userland(board.name) if options.isa else None
    folder = board_folder(board.name)
    with _locked(folder, board.name, deadline):
        if (folder / OFF).exists():
            raise BoardError(
                board.name,
                "unreachable",
                "the virtual board is switched off",
                remedy=f"run `harness boards power {board.name} on`",
            )
        state = State.read(folder)
        if state is not None and not _usable(state, options):
            _end(state, folder)
            state = None
        if state is None:
            state = _start(board.name, folder, options, idle_s, deadline, root)
    return Endpoint(state.host, state.port, state.host_key, folder / CLIENT_KEY, state.user)


def running() -> list[State]:
    """All live virtual boards of this state folder, by name."""
    found = (State.read(folder) for folder in sorted((existing_state_dir() / "boards").glob("*")))
    return [state for state in found if state is not None and state.alive]


def stop(board: Board | str) -> bool:
    """Ends the board and every process on it. False when it did not run. Idempotent."""
    name = board if isinstance(board, str) else board.name
    folder = board_folder(name)
    with _locked(folder, name, Deadline.after(START_SECONDS, "stop of the virtual board")):
        state = State.read(folder)
        ended = state is not None and _end(state, folder)
        child = _started.pop(folder, None)
        if child is not None:  # its state file may be gone, and a zombie must not stay
            ended = ended or child.poll() is None
            child.kill()
            child.wait()
        return ended


def switch_off(board: Board, *, deadline: Deadline) -> None:
    """Ends the board as a cut of its power would; nothing starts it but `switch_on`."""
    folder = board_folder(board.name)
    with _locked(folder, board.name, deadline):
        (folder / OFF).touch(mode=0o600)
    stop(board)


def switch_on(board: Board, *, deadline: Deadline) -> None:
    """Starts the board, switched off before or not. Raises as `ensure_running`."""
    (board_folder(board.name) / OFF).unlink(missing_ok=True)
    ensure_running(board, deadline=deadline)


def is_switched_off(board: Board) -> bool:
    return (existing_state_dir() / "boards" / board.name / OFF).exists()


def provoke(name: str) -> None:
    """The timed faults of a live board that have not come yet come now: `freeze_after`,
    `drop_link_at`, `reboot_at`. Those of a board without a session wait for one."""
    state = State.read(board_folder(name))
    if state is not None:
        _signal(state, signal.SIGUSR1)


def started_here() -> list[str]:
    """The names of the live boards that this process started.

    Others may use them too: who ends one holds its lease.
    """
    return [folder.name for folder, process in list(_started.items()) if process.poll() is None]


def stop_all() -> list[str]:
    """Ends every board of this state folder, whoever started it; returns their names."""
    return [state.name for state in running() if stop(state.name)]


def _options(board: Board) -> Options:
    values = {} if board.virtual is None else board.virtual.model_dump()
    switched = board.power is not None and board.power.driver == "fake"
    # Who switches its power wants to see that it booted.
    return Options.of({**values, "own_boot_id": switched})


def _refuse_unsupported(board: Board) -> None:
    if sys.platform != "linux":
        raise BoardError(
            board.name,
            "unreachable",
            f"virtual boards need Linux, this is {sys.platform}",
            expected="Linux",
            remedy="run the harness on Linux, or use boards of hardware",
        )


@contextlib.contextmanager
def _locked(folder: Path, name: str, deadline: Deadline) -> Iterator[None]:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.expired:
                    raise BoardError(
                        name,
                        "timeout",
                        "another process has been starting or stopping this virtual board "
                        "for too long",
                        remedy=f"look at {folder / LOG}",
                    ) from None
                time.sleep(min(0.05, deadline.remaining))
        yield
    finally:
        os.close(descriptor)


def _usable(state: State, options: Options) -> bool:
    if not state.alive or state.options != options.digest:
        return False
    if options.refuse or options.reboot_at:
        return True  # not answering is what they are asked for
    with contextlib.suppress(OSError), socket.create_connection((state.host, state.port), 5.0):
        return True
    return False


def _userland(name: str) -> Path:
    """What an emulated board's programs are; the first time this takes longer than a start may."""
    try:
        return userland()
    except NoUserland as error:
        raise BoardError(
            name,
            "unreachable",
            f"this machine cannot be that virtual board: {error.found}",
            expected=error.expected,
            remedy=error.remedy,
        ) from error


def _start(
    name: str,
    folder: Path,
    options: Options,
    idle_s: float,
    deadline: Deadline,
    root: Path | None = None,
) -> State:
    for key in (HOST_KEY, CLIENT_KEY):
        _make_key(folder / key)
    log_path = folder / LOG
    fresh = not log_path.exists() or log_path.stat().st_size > LOG_LIMIT
    with log_path.open("wb" if fresh else "ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness.boards.virtual", name),
                *("--folder", str(folder), "--options", options.to_json(), "--idle-s", str(idle_s)),
                *(("--userland", str(root)) if root else ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=_server_environment(),
            start_new_session=True,
        )
    _started[folder] = process
    while not deadline.expired:
        state = State.read(folder)
        if state is not None and state.pid == process.pid and state.alive:
            return state
        code = process.poll()
        if code is not None:
            _started.pop(folder, None)
            said = _log_tail(log_path, begin)
            unsupported = code == EXIT_UNSUPPORTED
            raise BoardError(
                name,
                "unreachable",
                f"this machine cannot be that virtual board: {said}"
                if unsupported
                else f"the virtual board ended at its start (code {code}): {said}",
                remedy="install what is missing, or remove that option from 'virtual'"
                if unsupported
                else f"see {log_path}",
            )
        time.sleep(0.02)
    process.kill()
    process.wait()
    _started.pop(folder, None)
    raise BoardError(
        name,
        "timeout",
        f"the virtual board did not start in time: {_log_tail(log_path, begin)}",
        remedy=f"see {log_path}",
    )


def _server_environment() -> dict[str, str]:
    """What the server itself needs. It is readable in /proc by the board's commands: no secrets."""
    names = ("HOME", "LANG", "TZ", "LD_LIBRARY_PATH")
    values = {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(PASSED_ON)
    }
    package = str(Path(__file__).resolve().parents[3])
    return {
        **values,
        "PATH": os.pathsep.join(SYSTEM_PATH),
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }


def _make_key(path: Path) -> None:
    """An Ed25519 key pair in OpenSSH's format, made once; both files readable by us only."""
    public = path.with_name(f"{path.name}.pub")
    if path.exists() and public.exists():
        return
    key = asyncssh.generate_private_key("ssh-ed25519", comment="virtual board")
    for target, data in ((public, key.export_public_key()), (path, key.export_private_key())):
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(target)


def _end(state: State, folder: Path) -> bool:
    """SIGTERM, by which a board ends its processes itself; then SIGKILL to all that is left."""
    was_alive = state.alive
    if was_alive:
        below = processes.descendants(state.pid)
        _signal(state, signal.SIGTERM)
        if not _gone(state, folder, STOP_SECONDS / 2):
            _signal(state, signal.SIGKILL)
            _gone(state, folder, STOP_SECONDS / 2)
        # A board that was killed, or was frozen, could not end them; they are found by identity.
        processes.kill(below)
    with contextlib.suppress(FileNotFoundError):
        (folder / STATE).unlink()
    return was_alive


def _signal(state: State, number: int) -> None:
    if state.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.pid, number)


def _gone(state: State, folder: Path, seconds: float) -> bool:
    child = _started.get(folder)
    deadline = Deadline.after(seconds)
    while state.alive:
        if deadline.expired:
            return False
        time.sleep(0.02)
    if child is not None and child.pid == state.pid:
        child.wait()
        _started.pop(folder, None)
    return True


def _log_tail(path: Path, begin: int) -> str:
    """The last line that this start wrote."""
    try:
        lines = path.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "it said nothing"
