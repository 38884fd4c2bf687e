"""Power by commands of the lab host, such as those of a USB relay or a PDU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from typing import IO, TYPE_CHECKING

from harness.boards.power.base import PowerState
from harness.credentials import without_credentials
from harness.errors import BoardError

if TYPE_CHECKING:
    from harness.deadline import Deadline
    from harness.inventory import Board

SAID_BYTES = 4096  # of a command's output
STATES = {"on": PowerState.ON, "off": PowerState.OFF}


class CommandPower:
    """A shell command for each action, as devices.yaml writes it; `HARNESS_BOARD` is the name.

    `status` prints `on` or `off`. Another word, another exit status than 0, and no answer in time
    are UNKNOWN.
    """

    def __init__(self, board: Board) -> None:
        if board.power is None or board.power.command is None:
            raise ValueError(f"board {board.name} has no power commands")
        self.board, self.commands = board, board.power.command
        self.tells_status = self.commands.status is not None

    def on(self, deadline: Deadline) -> None:
        self._act("on", self.commands.on, deadline)

    def off(self, deadline: Deadline) -> None:
        self._act("off", self.commands.off, deadline)

    def status(self, deadline: Deadline) -> PowerState:
        if self.commands.status is None:
            return PowerState.UNKNOWN
        code, said, _ = self._run(self.commands.status, deadline)
        if code != 0:
            return PowerState.UNKNOWN
        return STATES.get(said.strip().lower(), PowerState.UNKNOWN)

    def _act(self, name: str, command: str, deadline: Deadline) -> None:
        code, said, complaint = self._run(command, deadline)
        if code == 0:
            return
        # The command itself is not repeated: its words may be nobody's business.
        words = without_credentials(complaint.strip() or said.strip()).splitlines()
        raise BoardError(
            self.board.name,
            "power",
            f"the command for power {name} did not end in time ({deadline.label})"
            if code is None
            else f"the command for power {name} ended with status {code}: "
            f"{words[-1][:200] if words else 'it said nothing'}",
            expected="status 0",
            remedy=f"try the command 'power.command.{name}' of devices.yaml by hand",
        )

    def _run(self, command: str, deadline: Deadline) -> tuple[int | None, str, str]:
        """(exit status, None at the deadline; both outputs). Nothing of it lives on after that.

        Outputs go to files: a child that the command leaves in the background must not keep us.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "HARNESS_BOARD": self.board.name},
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = process.wait(timeout=deadline.remaining)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            return code, _head(out), _head(err)


class CyclingCommandPower(CommandPower):
    """With a command of its own for off and on again."""

    def cycle(self, deadline: Deadline) -> None:
        self._act("cycle", self.commands.cycle or "", deadline)


def _head(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(SAID_BYTES).decode(errors="replace")


def _commands(board: Board) -> CommandPower:
    power = board.power
    cycles = power is not None and power.command is not None and power.command.cycle is not None
    return CyclingCommandPower(board) if cycles else CommandPower(board)


DRIVER = _commands
