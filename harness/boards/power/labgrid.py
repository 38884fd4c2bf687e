"""Power of a place in a labgrid lab, by labgrid's own client.

The client is a program: its protocol to the coordinator may change without us, and its event loop
stays out of our threads. Where the coordinator is, labgrid knows from `LG_COORDINATOR`. Our lease
holds the board; labgrid's place is acquired only for as long as something is switched, unless this
user has acquired it before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.boards.power.base import PowerState
from harness.deadline import Deadline
from harness.errors import BoardError, HarnessError

if TYPE_CHECKING:
    from harness.inventory import Board

CLIENT = "labgrid-client"
RELEASE_S = 15.0  # also after the deadline of what was switched
STATES = {"is on": PowerState.ON, "is off": PowerState.OFF}


class LabgridPower:
    """Raises HarnessError where labgrid's client is not installed."""

    tells_status = True

    def __init__(self, board: Board) -> None:
        if board.power is None or board.power.place is None:
            raise ValueError(f"board {board.name} has no labgrid place")
        self.board, self.place = board, board.power.place
        # Beside our own Python first: the extra puts it there, and nobody activates a venv for us.
        folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        found = shutil.which(CLIENT, path=os.pathsep.join(folders))
        if found is None:
            raise HarnessError(
                f"no {CLIENT} on PATH",
                where=f"board {board.name}",
                expected="labgrid's client, by which its place is switched",
                remedy="run: pip install 'decode-harness[labgrid]'",
            )
        self._client = found

    def on(self, deadline: Deadline) -> None:
        self._act("on", deadline)

    def off(self, deadline: Deadline) -> None:
        self._act("off", deadline)

    def cycle(self, deadline: Deadline) -> None:
        self._act("cycle", deadline)

    def status(self, deadline: Deadline) -> PowerState:
        with self._acquired(deadline):
            code, said = self._call(["power", "get"], deadline)
        if code != 0:
            return PowerState.UNKNOWN
        last = said.strip().splitlines()[-1] if said.strip() else ""
        return next((s for end, s in STATES.items() if last.endswith(end)), PowerState.UNKNOWN)

    def _act(self, action: str, deadline: Deadline) -> None:
        with self._acquired(deadline) as refused:
            code, said = self._call(["power", action], deadline)
        if code != 0:
            words = (refused or said).strip().splitlines()
            raise BoardError(
                self.board.name,
                "power",
                f"labgrid did not switch place {self.place} {action}: "
                f"{words[-1][:200] if words else 'it said nothing'}",
                expected="a place that is free, or acquired by this user",
                remedy=f"see `{CLIENT} -p {self.place} show`, and LG_COORDINATOR",
            )

    @contextlib.contextmanager
    def _acquired(self, deadline: Deadline) -> Iterator[str]:
        """Holds the place; gives why it could not be acquired, "" when it was.

        One that this user has already is switched all the same: labgrid itself refuses others.
        """
        code, said = self._call(["acquire"], deadline)
        try:
            yield "" if code == 0 else said
        finally:
            if code == 0:
                self._call(["release"], Deadline.after(RELEASE_S, "releasing a labgrid place"))

    def _call(self, words: list[str], deadline: Deadline) -> tuple[int, str]:
        """(exit status, what it said on both streams); 124 at the deadline."""
        try:
            done = subprocess.run(
                [self._client, "-p", self.place, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(0.1, deadline.remaining),
                check=False,  # each caller has something to say about it
            )
        except subprocess.TimeoutExpired:
            return 124, f"no answer from {CLIENT} in time ({deadline.label})"
        return done.returncode, done.stdout.decode(errors="replace")


DRIVER = LabgridPower
