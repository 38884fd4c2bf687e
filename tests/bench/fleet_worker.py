"""One contestant of the scale benchmark in a process of its own: what drives many boards at once.

Asked to open, it logs in to all boards; then it does a task on all of them; then it closes. A task
has ended when every board has answered. `python -m tests.bench.fleet_worker NAME`.
"""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from .protocol import serve

DEADLINE_S = 300.0
SSH_AT_ONCE = 32  # of xargs: more processes than that gain nothing on a few cores
Boards = Mapping[str, Mapping[str, Any]]  # by name: host, port, user, key_file, host_key, …


class Contestant(Protocol):
    def open(self, boards: Boards) -> None: ...
    def do(self, task: str, command: str) -> None:
        """`command` is the task as one line for a shell, for whoever has no own way to do it."""
        ...

    def close(self) -> None: ...


class Ours:
    """The harness's own executor: a thread and a connection for each board."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.bundle: Any = None
        self.files: list[Path] = []

    def open(self, boards: Boards) -> None:
        from harness.connect import open_session
        from harness.deadline import Deadline
        from harness.inventory import Board

        first = next(iter(boards.values()))
        if self.bundle is None:
            self.bundle, self.files = small_bundle(Path(first["bundle"]))
        fields = ("host", "port", "user", "key_file", "host_key")
        wanted = [
            Board(name=name, folders=("~/work",), **{key: board[key] for key in fields})
            for name, board in boards.items()
        ]
        self.pool = ThreadPoolExecutor(len(wanted))

        def connect(board: Board) -> Any:
            return open_session(board, deadline=Deadline.after(DEADLINE_S))

        self.sessions = dict(zip(boards, self.pool.map(connect, wanted), strict=True))

    def do(self, task: str, command: str) -> None:
        from harness.boards.probe import probe
        from harness.deadline import Deadline
        from harness.deploy.push import deploy

        def one(name: str) -> None:
            session, limit = self.sessions[name], Deadline.after(DEADLINE_S)
            if task == "probe":
                self.facts[name] = probe(session, deadline=limit)
            elif task == "deploy":
                deploy(session, self.facts[name], self.bundle, self.files, deadline=limit)
            else:
                session.run(command, deadline=limit, check=True)

        list(self.pool.map(one, self.sessions))

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.pool.shutdown()


class Fabric:
    """fabric's ThreadingGroup."""

    def open(self, boards: Boards) -> None:
        import fabric

        self.group = fabric.ThreadingGroup.from_connections(
            fabric.Connection(
                board["host"],
                user=board["user"],
                port=board["port"],
                connect_kwargs={
                    "key_filename": board["key_file"],
                    "allow_agent": False,
                    "look_for_keys": False,
                    "banner_timeout": 60,
                },
            )
            for board in boards.values()
        )
        self.do("open", "true")

    def do(self, task: str, command: str) -> None:
        self.group.run(command, hide=True, in_stream=False)

    def close(self) -> None:
        self.group.close()


class Ssh:
    """OpenSSH's client, a process for each command; `shared` keeps one connection for each board
    (ControlMaster), and `at_once` run side by side under xargs."""

    def __init__(self, shared: bool, at_once: int) -> None:
        self.shared, self.at_once = shared, at_once

    def open(self, boards: Boards) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ssh-"))  # short: it holds sockets
        (self.folder / "hosts").write_text("".join(f"{name}\n" for name in boards))
        known = [f"[{b['host']}]:{b['port']} {b['public_host_key']}\n" for b in boards.values()]
        (self.folder / "known_hosts").write_text("".join(known))
        lines = []
        for name, board in boards.items():
            lines += [f"Host {name}", f"  HostName {board['host']}", f"  Port {board['port']}"]
            lines += [f"  User {board['user']}", f"  IdentityFile {board['key_file']}"]
        lines += ["Host *", f"  UserKnownHostsFile {self.folder}/known_hosts"]
        lines += ["  StrictHostKeyChecking yes", "  BatchMode yes", "  LogLevel ERROR"]
        lines += ["  IdentitiesOnly yes", "  GlobalKnownHostsFile /dev/null"]
        if self.shared:
            lines += [f"  ControlPath {self.folder}/%C"]
        (self.folder / "config").write_text("\n".join(lines) + "\n")
        if self.shared:
            # A master goes to the background once it has logged in.
            self._all("-o ControlMaster=yes -o ControlPersist=yes -fN {}")
        else:
            self.do("open", "true")

    def do(self, task: str, command: str) -> None:
        (self.folder / "command").write_text(command)
        self._all(f'{{}} "$(cat {self.folder}/command)"')

    def close(self) -> None:
        if self.shared:
            self._all("-O exit {}")
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def _all(self, arguments: str) -> None:
        line = f"ssh -F {self.folder}/config {arguments} </dev/null >/dev/null 2>&1"
        xargs = ["xargs", "-a", str(self.folder / "hosts"), "-P", str(self.at_once), "-I{}"]
        subprocess.run([*xargs, "sh", "-c", line], check=True, stdin=subprocess.DEVNULL)


CONTESTANTS: Mapping[str, Callable[[], Contestant]] = {
    "ours": Ours,
    "fabric": Fabric,
    "ssh-shared": lambda: Ssh(shared=True, at_once=SSH_AT_ONCE),
    "ssh-xargs": lambda: Ssh(shared=False, at_once=SSH_AT_ONCE),
    "ssh-loop": lambda: Ssh(shared=False, at_once=1),
}


def small_bundle(folder: Path) -> tuple[Any, list[Path]]:
    """A bundle of the engine's shape with next to nothing in it, and a model of 1 MiB."""
    import hashlib

    from harness.deploy.bundle import Bundle, Part, plain_tar

    numpy = b"class ones:\n def __init__(s, *a): pass\n def __matmul__(s, o): return s\n"
    contents = {
        "engine": [("engine/__init__.py", b"")],
        "numpy": [("numpy/__init__.py", numpy)],
        "psutil": [("psutil/__init__.py", b"")],
    }
    parts = []
    for name, files in contents.items():
        data = plain_tar(files)
        digest = hashlib.sha256(data).hexdigest()
        path = folder / f"{digest}.tar"
        path.write_bytes(data)
        kind = "engine" if name == "engine" else "wheel"
        parts.append(Part(name, kind, path, digest, len(data), len(data)))  # type: ignore[arg-type]  # one of the two
    model = folder / "model.package"
    model.write_bytes(bytes(range(256)) * 4096)
    return Bundle(tuple(parts), "small"), [model]


def deploy_command(folder: Path, python: str) -> str:
    """What our deployment asks a board, as one line for a shell."""
    from harness.deploy import push

    bundle, files = small_bundle(folder)
    items = push._items(bundle, files)
    needed = [{"hash": item.sha256, "kind": item.kind, "bytes": item.space} for item in items]
    argv = (python, *push.PYTHON_FLAGS)
    request = {"do": "survey", "candidates": ["~/work"], "needed": needed}
    text = json.dumps({**request, "trial": push._trial(bundle, argv)})
    return f"cd / && exec {shlex.join([*argv, '-c', push._ON_BOARD.read_text(), text])}"


def main(name: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    contestant = CONTESTANTS[name]()

    def timed(work: Callable[[], None]) -> dict[str, float]:
        begin = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - begin}

    def close() -> dict[str, float]:
        contestant.close()
        return {}

    serve(
        {
            "open": lambda boards: timed(lambda: contestant.open(boards)),
            "task": lambda task, command: timed(lambda: contestant.do(task, command)),
            "close": close,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1])
