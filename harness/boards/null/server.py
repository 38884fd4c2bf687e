"""The process behind null boards: one SSH and SFTP endpoint on loopback for each.

They are ordinary boards to whoever connects: a shell, Python, a home folder of their own. What they
lack is everything that a virtual board has of a machine (processor, limits, faults, an init), so
that hundreds fit a laptop. Each counts what it is asked: connections, commands, SFTP channels.

Told to `remember`, they answer a request that any of them has answered before from memory, with
this board's folder and the request's own random markers put in. 200 boards of hardware have 200
processors; here they would all run on the host's, and a benchmark of the host would measure them.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import getpass
import json
import logging
import os
import re
import resource
import signal
import sys
from pathlib import Path

import asyncssh
import yaml

from harness.boards.virtual import home, processes
from harness.boards.virtual.commands import Commands
from harness.boards.virtual.options import Options
from harness.boards.virtual.server import LOOPBACK, PR_SET_CHILD_SUBREAPER
from harness.connect.shell import BOOT

log = logging.getLogger(__name__)

CLIENT_KEY = "client_key"
# Markers that differ from request to request: harness.connect.shell's and the probe's.
_MARKER = re.compile(rb"\b(?:[0-9a-f]{32}|[0-9a-f]{16})\b")
# The process of a remembered command is long gone, and its id may be another's: whoever ends it
# must meet nobody. Linux gives no id above 2**22.
_BEGUN = re.compile(rb"(\.b )\d+( [gt]\n)")
_NOBODY = rb"\g<1>4194305\g<2>"

Answer = tuple[bytes, bytes, int]  # stdout, stderr, status


@dataclasses.dataclass
class Asked:
    """What one board was asked since its start."""

    connections: int = 0  # that logged in
    commands: int = 0
    sftp: int = 0


class NullBoard:
    """One endpoint. `memory` is shared by all boards of the process."""

    def __init__(self, name: str, folder: Path, memory: dict[bytes, Answer]) -> None:
        self.name, self.home, self.memory = name, folder / name, memory
        self.asked = Asked()
        self.remembering = False
        options = Options()
        home.furnish(self.home, options)
        self.environment = home.environment(self.home, options, getpass.getuser(), os.environ)
        self._commands = Commands(options, self.environment, folder=self.home)

    async def listen(self, key: asyncssh.SSHKey, client_keys: asyncssh.SSHAuthorizedKeys) -> int:
        """Begin to answer; the port."""
        listener = await asyncssh.listen(
            LOOPBACK,
            0,
            server_factory=lambda: _Gate(self.asked),
            server_host_keys=[key],
            process_factory=self._serve,
            sftp_factory=self._sftp,
            encoding=None,
            allow_pty=False,
            line_editor=False,
            agent_forwarding=False,
            authorized_client_keys=client_keys,
            login_timeout=120,  # hundreds log in at once
            backlog=256,
        )
        return int(listener.get_port())

    def _sftp(self, channel: asyncssh.SSHServerChannel[bytes]) -> asyncssh.SFTPServer:
        self.asked.sftp += 1
        return _Files(channel, self.home)

    async def _serve(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        self.asked.commands += 1
        if not self.remembering:
            await self._commands.serve(channel)
            return
        try:
            # Only the harness's own command line is known to read its input to the end.
            given = await channel.stdin.read() if channel.command == BOOT else b""
            out, err, status = await self._answer(channel.command or "", given)
            channel.stdout.write(out)
            channel.stderr.write(err)
            channel.exit(status)
        except (OSError, asyncssh.Error) as error:
            log.info("%s: channel ended: %r", self.name, error)

    async def _answer(self, command: str, given: bytes) -> Answer:
        asked = command.encode("utf-8", "surrogateescape") + b"\0" + given
        markers = list(dict.fromkeys(_MARKER.findall(asked)))
        names = [(marker, b"@marker-%d@" % at) for at, marker in enumerate(markers)]
        own = [*names, (os.fsencode(self.home), b"@home@")]
        request = _replaced(asked, own)
        if request not in self.memory:
            out, err, status = await self._run(command, given)
            out = _BEGUN.sub(_NOBODY, out)
            self.memory[request] = (_replaced(out, own), _replaced(err, own), status)
        out, err, status = self.memory[request]
        back = [(new, old) for old, new in own]
        return _replaced(out, back), _replaced(err, back), status

    async def _run(self, command: str, given: bytes) -> Answer:
        process = await asyncio.create_subprocess_exec(
            *(self.environment["SHELL"], "-c", command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment,
            cwd=self.home,
            start_new_session=True,
        )
        out, err = await process.communicate(given)
        code = process.returncode or 0
        return out, err, code if code >= 0 else 128 - code


class _Files(asyncssh.SFTPServer):
    """Relative paths begin at the board's home, not where this process stands."""

    def __init__(self, channel: asyncssh.SSHServerChannel[bytes], start: Path) -> None:
        super().__init__(channel)
        self._start = os.fsencode(start)

    def map_path(self, path: bytes) -> bytes:
        return super().map_path(os.path.join(self._start, path))  # noqa: PTH118 - paths are bytes


class _Gate(asyncssh.SSHServer):
    """Counts who came in."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def auth_completed(self) -> None:
        self._asked.connections += 1


def _replaced(data: bytes, pairs: list[tuple[bytes, bytes]]) -> bytes:
    for old, new in pairs:
        data = data.replace(old, new)
    return data


async def serve(count: int, folder: Path, farm: Path | None = None) -> None:
    """`count` boards below `folder`, until standard input ends.

    Prints one JSON object first: how to reach the boards; `farm` is written as a devices.yaml. Each
    line of input is a request, "counts" or "remember", and answered by one line.
    """
    memory: dict[bytes, Answer] = {}
    boards = [NullBoard(f"null-{number:03d}", folder, memory) for number in range(1, count + 1)]
    key = asyncssh.generate_private_key("ssh-ed25519")
    client = asyncssh.generate_private_key("ssh-ed25519", comment="null boards")
    _write_private(folder / CLIENT_KEY, client.export_private_key())
    allowed = asyncssh.import_authorized_keys(client.export_public_key().decode())
    ports = {board.name: await board.listen(key, allowed) for board in boards}
    told = {
        "ports": ports,
        "host": LOOPBACK,
        "host_key": key.get_fingerprint(),
        "public_host_key": key.export_public_key().decode().strip(),
        "key_file": str(folder / CLIENT_KEY),
        "user": getpass.getuser(),
    }
    if farm is not None:
        common = {name: told[name] for name in ("host", "host_key", "key_file", "user")}
        entries = {name: {**common, "port": port} for name, port in ports.items()}
        farm.write_text(yaml.safe_dump({"boards": entries}, sort_keys=False), encoding="utf-8")
    _say(told)
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(requests), sys.stdin
    )
    while line := await requests.readline():
        if line.strip() == b"remember":
            for board in boards:
                board.remembering = True
            _say({"remembering": True})
        elif line.strip() == b"counts":
            _say({board.name: dataclasses.asdict(board.asked) for board in boards})
        else:
            _say({"error": f"unknown request {line.decode(errors='replace').strip()!r}"})


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def run(count: int, folder: Path, farm: Path | None = None) -> None:
    """The life of the process. What its boards' commands left running ends with it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each command takes three pipes
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(serve(count, folder, farm))
    except KeyboardInterrupt:
        log.info("ended by a signal")
    finally:
        processes.kill_tree(os.getpid())
