"""Keeps what a board's console prints while something runs on the board.

Evidence beside the point: a console that cannot be read is noted where its text would stand, and
changes nothing about the run.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.credentials import without_credentials
from harness.deadline import Deadline
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.boards.console.base import ConsoleDriver
    from harness.inventory import Board

CONSOLE_NAME = "console.log"
OPEN_S = 60.0  # labgrid's client takes seconds to start on a busy host
WAIT_S = 0.3  # so long an end of the capture waits at most
REOPEN_S = 5.0  # after its end: an exporter that restarts is back by then
# Kept: the newest. A kernel's last words are at the end, and a board may print for ever.
LIMIT_BYTES = 2 << 20
LINE_BYTES = 4096
# Colours and cursor movements (ECMA-48), and control characters but the tab.
_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")


@contextlib.contextmanager
def capturing(board: Board, folder: Path) -> Iterator[None]:
    """Appends to `folder/console.log` what the console prints, each line behind the seconds since
    the start. Nothing where devices.yaml names no console."""
    if board.console is None:
        yield
        return
    capture = _Capture(board, folder / CONSOLE_NAME)
    capture.start()
    try:
        yield
    finally:
        capture.stop()


def last_lines(folder: Path, count: int = 12) -> list[str]:
    """The last lines that the console printed; none where there was no console."""
    path = folder / CONSOLE_NAME
    if not path.is_file():
        return []
    lines = path.read_text("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


class _Capture:
    def __init__(self, board: Board, path: Path) -> None:
        self._board, self._path = board, path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"console {board.name}", daemon=True)
        self._began = time.monotonic()
        self._rest = b""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(OPEN_S + WAIT_S)

    def _run(self) -> None:
        said = ""
        while not self._stopping.is_set():
            try:
                self._read()
                trouble = "the console ended"
            except (HarnessError, OSError) as error:
                trouble = without_credentials(str(error))
            if self._stopping.is_set():
                break
            if trouble != said:  # the same again and again would push out what matters
                self._write([f"[{trouble}]".encode()])
                said = trouble
            self._stopping.wait(REOPEN_S)
        if self._rest:
            self._write([self._rest])

    def _read(self) -> None:
        if self._board.console is None:
            return
        package = __name__.rpartition(".")[0]
        module = importlib.import_module(f"{package}.{self._board.console.driver}")
        driver: ConsoleDriver = module.DRIVER(self._board)
        with driver.open(Deadline.after(OPEN_S, "opening the console")) as stream:
            while not self._stopping.is_set():
                piece = stream.read(WAIT_S)
                if piece is None:
                    return
                if piece:
                    self._take(piece)

    def _take(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        stamp = f"{time.monotonic() - self._began:10.3f} "
        clean = [_CONTROL.sub(b"", line[:LINE_BYTES]).decode(errors="replace") for line in lines]
        if not clean:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{stamp}{line}\n" for line in clean)
            size = file.tell()
        if size > 2 * LIMIT_BYTES:
            kept = self._path.read_bytes()[-LIMIT_BYTES:].partition(b"\n")[2]
            self._path.write_bytes(b"[older lines were dropped]\n" + kept)
