"""Real servers on loopback ports, by pid: OpenSSH and dropbear with own keys and configuration,
and a relay in front of any of them that cuts the link at a byte."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from harness.connect import BoardSession, Watch, open_session
from harness.connect.hostkey import fingerprint
from harness.deadline import Deadline
from harness.inventory import Board

SSHD = "/usr/sbin/sshd"
DROPBEAR = "/usr/sbin/dropbear"

# Before version 2024.84 dropbear looks for keys in the home folder of the user database only.
HOME_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pwd.h>
#include <stdlib.h>
struct passwd *getpwnam(const char *name) {
  struct passwd *(*real)(const char *) = dlsym(RTLD_NEXT, "getpwnam");
  struct passwd *entry = real(name);
  if (entry && getenv("SHIM_HOME")) entry->pw_dir = getenv("SHIM_HOME");
  return entry;
}
"""


@dataclasses.dataclass
class Server:
    """A running server and the board that reaches it."""

    board: Board
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def pids(self) -> list[int]:
        """The server and its descendants."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                found.extend(int(child) for child in children.split())
        return found

    def signal(self, number: int) -> None:
        """To the server and to the processes of its connections."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Relay:
    """Passes connections on to a server, until it is told to cut them.

    `cut_after`: so many bytes from now on reach the server, the next ones never do, and every
    connection ends, once. `carried` counts bytes towards the server, over all connections.
    """

    def __init__(self, host: str, port: int, listen: str = "127.0.0.1") -> None:
        self.carried = 0
        self._target = (host, port)
        self._left: int | None = None
        self._lock = threading.Lock()
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server((listen, 0))
        self.host, self.port = self._listener.getsockname()
        # The accepting thread, and all that it starts, stay in the network of who made the relay.
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, count: int) -> None:
        with self._lock:
            self._left = count

    def board(self, board: Board) -> Board:
        """The same board, reached through here."""
        return board.model_copy(update={"host": self.host, "port": self.port})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # also ends an accept that is going on
        self._listener.close()
        self._cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._ends.append((near, far))
                for pump in (self._to_server, self._to_client):
                    threading.Thread(target=pump, args=(near, far), daemon=True).start()

    def _to_server(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                with self._lock:
                    cut = self._left is not None and len(data) >= self._left
                    data = data[: self._left] if cut else data
                    if self._left is not None:
                        self._left = None if cut else self._left - len(data)
                    self.carried += len(data)
                far.sendall(data)
                if cut:
                    self._cut()
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    @staticmethod
    def _to_client(near: socket.socket, far: socket.socket) -> None:
        """Until the server ends; what the client does not take any more is dropped: a server that
        is told of an error would throw away what it had received."""
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                with contextlib.suppress(OSError):
                    near.sendall(data)
        for end in (near, far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        """For the client the link is gone; the server gets no more than it has by now."""
        with self._lock:
            ends, self._ends = self._ends, []
        for near, far in ends:
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                near.shutdown(socket.SHUT_RDWR)
            near.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    """Makes relays in front of servers: `relay(board)`, or `relay(board, listen=address)`."""
    made: list[Relay] = []

    def make(board: Board, **options: Any) -> Relay:
        made.append(Relay(board.host, board.port, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = Deadline.after(seconds)
    while not condition():
        if deadline.expired:
            raise AssertionError(f"after {seconds} s still not: {what}")
        time.sleep(0.02)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            return probe.recv(4) == b"SSH-"
    except OSError:
        return False


def make_key(path: Path, kind: str = "ed25519") -> str:
    """A key pair; its fingerprint."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", str(path)], check=True
    )
    return fingerprint(paramiko.PKey.from_path(str(path)))


class Servers:
    """Starts servers and ends them, with everything below them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Server] = []

    def sshd(
        self,
        *lines: str,
        sftp: str | None = "internal-sftp",
        force: str = "",
        environment: str = "",
        host_key: Path | None = None,
        authorized_keys: Path | None = None,
        port: int = 0,
        kinds: tuple[str, ...] = ("ed25519",),
        **board: Any,
    ) -> Server:
        """`force` is a script that runs each command; the client's is in SSH_ORIGINAL_COMMAND."""
        if not Path(SSHD).exists():
            pytest.skip(f"needs an OpenSSH server, {SSHD} is not there")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True, mode=0o755)  # its privilege separation
        folder = self.folder / f"sshd-{len(self.running)}"
        folder.mkdir()
        keys = [folder / f"host_{kind}" for kind in kinds]
        pins = [make_key(key, kind) for key, kind in zip(keys, kinds, strict=True)]
        if host_key is not None:
            keys, pins = [host_key], [fingerprint(paramiko.PKey.from_path(str(host_key)))]
        self.client_key(folder)
        port = port or free_port()
        config = [
            f"Port {port}",
            "ListenAddress 127.0.0.1",
            *(f"HostKey {key}" for key in keys),
            f"AuthorizedKeysFile {authorized_keys or folder / 'authorized_keys'}",
            f"PidFile {folder}/pid",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PrintMotd no",
            "LogLevel ERROR",
            *([f"Subsystem sftp {sftp}"] if sftp else []),
            *([f"SetEnv {environment}"] if environment else []),
            *lines,
        ]
        if force:
            script = folder / "force"
            script.write_text(force)
            script.chmod(0o755)
            config.append(f"ForceCommand {script}")
        (folder / "config").write_text("\n".join(config) + "\n")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(folder / "config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.started(process, folder, port, {"host_key": pins[0], **board})

    def dropbear(self) -> Server:
        if not Path(DROPBEAR).exists() or not shutil.which("dropbearkey"):
            pytest.skip(f"needs dropbear, {DROPBEAR} is not there")
        folder = self.folder / f"dropbear-{len(self.running)}"
        folder.mkdir()
        self.client_key(folder)
        key = folder / "host"
        subprocess.run(
            ["dropbearkey", "-t", "ed25519", "-f", str(key)], check=True, capture_output=True
        )
        public = subprocess.run(
            ["dropbearkey", "-y", "-f", str(key)], check=True, capture_output=True, text=True
        ).stdout
        line = next(line for line in public.splitlines() if line.startswith("ssh-ed25519"))
        (folder / "host.pub").write_text(line + "\n")
        printed = subprocess.run(
            ["ssh-keygen", "-lf", str(folder / "host.pub")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        port = free_port()
        options, environment = self.dropbear_home(folder)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(DROPBEAR, "-F", "-E", "-s", "-r", str(key), "-p", f"127.0.0.1:{port}"),
                    *("-P", str(folder / "pid"), *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self.started(process, folder, port, {"host_key": printed.split()[1]})

    def dropbear_home(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Options and environment that make dropbear read our keys, not the user's."""
        usage = subprocess.run([DROPBEAR, "-h"], capture_output=True, text=True)
        if "-D" in usage.stderr + usage.stdout:
            return ["-D", str(folder)], dict(os.environ)
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("needs a dropbear with the option -D, or a C compiler for a substitute")
        (folder / "home.c").write_text(HOME_SHIM)
        library = folder / "home.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "home.c"), "-ldl"],
            check=True,
        )
        (folder / ".ssh").mkdir(mode=0o700)
        shutil.copy(folder / "authorized_keys", folder / ".ssh" / "authorized_keys")
        preload = {"LD_PRELOAD": str(library), "SHIM_HOME": str(folder)}
        return [], {**os.environ, **preload}

    def client_key(self, folder: Path) -> None:
        make_key(folder / "id")
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        (folder / "authorized_keys").chmod(0o600)
        folder.chmod(0o700)

    def started(
        self, process: subprocess.Popen[bytes], folder: Path, port: int, board: dict[str, Any]
    ) -> Server:
        user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True)
        values = {"user": user.stdout.strip(), "key_file": folder / "id", **board}
        server = Server(
            Board(name="real-1", host="127.0.0.1", port=port, **values), process, folder
        )
        self.running.append(server)
        wait_until(
            lambda: answers(port) or process.poll() is not None, 15, f"a server on port {port}"
        )
        if process.poll() is not None:
            raise AssertionError((folder / "log").read_text())
        return server

    def stop(self, server: Server) -> None:
        for pid in reversed(server.pids):
            for number in (signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        server.process.wait(10)

    def stop_all(self) -> None:
        for server in self.running:
            self.stop(server)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.stop_all()


@pytest.fixture
def connect() -> Iterator[Callable[..., BoardSession]]:
    """Opens sessions that are closed after the test."""
    opened: list[BoardSession] = []

    def open_one(board: Board, seconds: float = 30, watch: Watch | None = None) -> BoardSession:
        session = open_session(board, deadline=Deadline.after(seconds), watch=watch)
        opened.append(session)
        return session

    yield open_one
    for session in opened:
        session.close()


@pytest.fixture(scope="module")
def module_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    made.stop_all()
