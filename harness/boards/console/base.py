"""The protocol of console drivers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from harness.deadline import Deadline


class ConsoleStream(Protocol):
    """What a console prints, from now on. Nothing is ever written to it."""

    def read(self, wait_s: float) -> bytes | None:
        """What came, waiting at most `wait_s` seconds for the first byte of it; b"" when nothing
        did, None when nothing more will come. Raises OSError."""
        ...


class ConsoleDriver(Protocol):
    """Made from a board whose entry names it: `DRIVER(board)`."""

    def open(self, deadline: Deadline) -> AbstractContextManager[ConsoleStream]:
        """Raises BoardError "console" when it cannot be read."""
        ...
