"""Errors that a user meets. Each says what was found, what was expected and what to do.

They are infrastructure or wrong use (exit code 2), never a finding about the product.
"""

from __future__ import annotations


class HarnessError(Exception):
    """Base of everything a command reports in one message, without a traceback.

    `where` is a file and line, a board or a path; it leads the message.
    """

    def __init__(
        self,
        found: str,
        *,
        where: str = "",
        expected: str = "",
        remedy: str = "",
    ) -> None:
        self.found, self.where, self.expected, self.remedy = found, where, expected, remedy
        super().__init__(found)

    def __str__(self) -> str:
        text = f"{self.where}: {self.found}" if self.where else self.found
        if self.expected:
            text += f"; expected {self.expected}"
        if self.remedy:
            text += f"; {self.remedy}"
        return text


class BoardError(HarnessError):
    """Trouble with one board; the others carry on. `kind` is stable and stored with the outcome."""

    KINDS = (
        "unreachable",  # no TCP connection, or refused
        "host-key",  # the key differs from the pinned one
        "auth",
        "timeout",  # a deadline passed while the board still answered
        "board-lost",  # the board stopped answering
        "board-reset",  # its boot_id changed
        "no-python",
        "no-space",
        "no-folder",  # no candidate folder can be written and executed from
        "transfer",
        "deploy",
        "busy",  # leased by somebody else
        "quarantined",  # set aside until a health check passes
        "power",  # its supply could not be switched
        "console",  # its serial console cannot be read
        "low-memory",  # what would fit the board does not fit beside what it runs now
        "engine",  # the engine could not start
        "protocol",  # the board sent what we cannot read
    )

    def __init__(
        self,
        board: str,
        kind: str,
        found: str,
        *,
        expected: str = "",
        remedy: str = "",
    ) -> None:
        if kind not in self.KINDS:
            raise ValueError(f"unknown board error kind {kind!r}, known: {self.KINDS}")
        self.board, self.kind = board, kind
        super().__init__(found, where=f"board {board}", expected=expected, remedy=remedy)
