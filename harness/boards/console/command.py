"""A console by a command of the lab host that prints it, such as `picocom` or `socat`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from harness.boards.console.base import ConsoleStream
    from harness.deadline import Deadline
    from harness.inventory import Board

PIECE_BYTES = 64 << 10


class CommandConsole:
    """What the shell command of devices.yaml prints; `HARNESS_BOARD` is the board's name."""

    def __init__(self, board: Board) -> None:
        if board.console is None or board.console.command is None:
            raise ValueError(f"board {board.name} has no console command")
        self.board, self.command = board, board.console.command

    @contextlib.contextmanager
    def open(self, deadline: Deadline) -> Iterator[ConsoleStream]:
        del deadline  # a process starts at once, or not at all
        process = subprocess.Popen(
            ["/bin/sh", "-c", self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HARNESS_BOARD": self.board.name},
            start_new_session=True,
        )
        try:
            if process.stdout is None:  # it was asked for
                raise OSError("no pipe from the console's command")
            yield _Pipe(process.stdout)
        finally:
            # Its group: what the shell started holds the serial port.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class _Pipe:
    def __init__(self, file: IO[bytes]) -> None:
        self._descriptor = file.fileno()

    def read(self, wait_s: float) -> bytes | None:
        ready, _, _ = select.select([self._descriptor], [], [], wait_s)
        if not ready:
            return b""
        return os.read(self._descriptor, PIECE_BYTES) or None


DRIVER = CommandConsole
