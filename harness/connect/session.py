"""One connection to one board: commands, files, and a watchdog that notices when it is gone."""

from __future__ import annotations

import io
import logging
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import paramiko

from harness.connect.command import CommandResult, execute
from harness.connect.dial import Limits, Link, dial, way_to
from harness.connect.transfer import Transfer
from harness.connect.watch import Watch, Watchdog
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board

log = logging.getLogger(__name__)

LIMIT_BYTES = 64 << 20
Progress = Callable[[int, int], None]


class BoardSession:
    """Safe to use from several threads. Every wait ends by its deadline or by the watchdog."""

    def __init__(self, board: Board, link: Link, watch: Watch) -> None:
        self.board = board
        self._link = link
        self._closed = threading.Event()
        self._watchdog = Watchdog(link.transport, link.wire, watch, board.name, link.close)
        self._transfer = Transfer(self)

    def __enter__(self) -> BoardSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def transport(self) -> paramiko.Transport:
        return self._link.transport

    @property
    def connection(self) -> Any:
        """The fabric Connection, for what this class does not offer."""
        return self._link.connection

    @property
    def alive(self) -> bool:
        return self._link.transport.is_active() and not self._closed.is_set()

    def run(
        self,
        command: Sequence[str] | str,
        *,
        deadline: Deadline,
        stdin: bytes | None = None,
        check: bool = False,
        limit_bytes: int = LIMIT_BYTES,
    ) -> CommandResult:
        """Runs argv (quoted here) or the text of a POSIX sh script; returns when it ends.

        Returns also when background children of the script still hold its output streams. Standard
        input is `stdin`, else empty. `check` turns a status other than 0 into BoardError. When the
        deadline passes or the output exceeds `limit_bytes`, the remote process group is ended and
        BoardError tells whether that worked; `board-lost` when the board is gone.
        """
        script = command if isinstance(command, str) else shlex.join(command)
        title = _title(script)
        result = self.execute(script, deadline=deadline, feed=stdin or b"", limit_bytes=limit_bytes)
        if check and result.status != 0:
            said = result.stderr.decode(errors="replace").strip()[-400:]
            raise self.error(
                "protocol",
                f"{title} ended with status {result.status}" + (f": {said}" if said else ""),
                expected="status 0",
            )
        return result

    def execute(
        self,
        script: str,
        *,
        deadline: Deadline,
        feed: bytes | Iterable[bytes] = b"",
        limit_bytes: int = LIMIT_BYTES,
        title: str = "",
    ) -> CommandResult:
        """`run` for a script whose input is made as it is sent. `title` names it in messages."""
        title = title or _title(script)
        if not self.alive:
            raise self.lost(title)
        result = execute(
            self, script, deadline=deadline, feed=feed, limit_bytes=limit_bytes, title=title
        )
        log.debug(
            "board %s: %s: status %d, %d + %d bytes, %.3f s",
            self.board.name,
            title,
            result.status,
            len(result.stdout),
            len(result.stderr),
            result.seconds,
        )
        return result

    def push_file(
        self,
        local: Path,
        remote: str,
        *,
        deadline: Deadline,
        mode: int = 0o644,
        on_progress: Progress | None = None,
    ) -> None:
        """Copies a file: resumed where a lost link left it, verified by SHA-256, then renamed.

        `on_progress(bytes done, bytes in all)`. Raises BoardError (transfer, no-space, timeout,
        board-lost); nothing partial stays unless the link is lost.
        """
        with local.open("rb") as source:
            self._transfer.push(source, remote, deadline, mode, on_progress)

    def push_bytes(
        self, data: bytes, remote: str, *, deadline: Deadline, mode: int = 0o644
    ) -> None:
        """As `push_file`, from memory."""
        self._transfer.push(io.BytesIO(data), remote, deadline, mode, None)

    def read_from(self, remote: str, offset: int, limit: int, *, deadline: Deadline) -> bytes:
        """At most `limit` bytes from `offset` on; empty at the end of the file."""
        return self._transfer.read_from(remote, offset, limit, deadline)

    def pull_file(
        self,
        remote: str,
        local: Path,
        *,
        deadline: Deadline,
        limit_bytes: int = 1 << 30,
        sha256: str | None = None,
    ) -> None:
        """Copies a file here through a temporary name. Refuses one larger than `limit_bytes`.

        With `sha256` the file is verified, and resumed where a lost link or a deadline left it.
        """
        self._transfer.pull(remote, local, deadline, limit_bytes, sha256)

    def close(self) -> None:
        """Ends the connection without waiting for the board. May be called again."""
        self._closed.set()
        self._watchdog.stop()
        self._transfer.close()
        self._link.close()

    def error(self, kind: str, found: str, *, expected: str = "", remedy: str = "") -> BoardError:
        return BoardError(self.board.name, kind, found, expected=expected, remedy=remedy)

    def lost(self, doing: str) -> BoardError:
        """Why the connection is gone, as an error of what was being done."""
        if self._closed.is_set():
            why = "the session was closed here"
        else:
            why = self._watchdog.verdict or "the connection was dropped"
        return self.error(
            "board-lost", f"lost during {doing}: {why}", remedy="check its power and network"
        )


def open_session(
    board: Board, *, deadline: Deadline, limits: Limits | None = None, watch: Watch | None = None
) -> BoardSession:
    """Connects, through the board's jump hosts, checks the pinned host key and logs in.

    A virtual board is started first. Raises BoardError (unreachable, host-key, auth, protocol).
    """
    link = dial(way_to(board), deadline, limits or Limits())
    return BoardSession(board, link, watch or Watch())


def _title(script: str) -> str:
    line = script.strip().partition("\n")[0]
    return f"`{line if len(line) <= 60 else line[:59] + '…'}`"
