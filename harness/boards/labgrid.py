"""One place of a labgrid lab, through labgrid's own client.

The client is a program: its protocol to the coordinator may change without us, and its event loop
stays out of our threads. Where the coordinator is, labgrid knows from `LG_COORDINATOR`. Our lease
holds the board; labgrid's place is acquired only for as long as it is used, unless this user has
acquired it before.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from harness.deadline import Deadline
from harness.errors import HarnessError

CLIENT = "labgrid-client"
RELEASE_S = 15.0  # also after the deadline of what was done

# Of this process, by name: how many users the place has. Power may be switched while its console
# is read, and the first of them to end must not take the place from the other.
_users: dict[str, int] = {}
_users_lock = threading.Lock()


class LabgridPlace:
    """Raises HarnessError where labgrid's client is not installed."""

    def __init__(self, board: str, place: str) -> None:
        """`board` is the name that errors say."""
        self.name = place
        # Beside our own Python first: the extra puts it there, and nobody activates a venv for us.
        folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        found = shutil.which(CLIENT, path=os.pathsep.join(folders))
        if found is None:
            raise HarnessError(
                f"no {CLIENT} on PATH",
                where=f"board {board}",
                expected="labgrid's client, by which its place is used",
                remedy="run: pip install 'decode-harness[labgrid]'",
            )
        self._client = found

    @contextlib.contextmanager
    def acquired(self, deadline: Deadline) -> Iterator[str]:
        """Holds the place; gives why it could not be acquired, "" when it was.

        One that this user has already is usable all the same: labgrid itself refuses others.
        """
        with _users_lock:
            first = not _users.get(self.name)
            code, said = self.call(["acquire"], deadline) if first else (0, "")
            held = code == 0
            if held:
                _users[self.name] = _users.get(self.name, 0) + 1
        try:
            yield "" if held else said
        finally:
            if held:
                with _users_lock:
                    _users[self.name] -= 1
                    if not _users[self.name]:
                        limit = Deadline.after(RELEASE_S, "releasing a labgrid place")
                        self.call(["release"], limit)

    @staticmethod
    def stranger(shown: str) -> str:
        """Who else has the place, by what `labgrid-client show` says: "host/user", "" for nobody
        or this user."""
        found = re.search(r"(?m)^ +acquired: (\S+)$", shown)
        host = os.environ.get("LG_HOSTNAME") or socket.gethostname()
        user = os.environ.get("LG_USERNAME") or getpass.getuser()
        return "" if not found or found[1] in ("None", f"{host}/{user}") else found[1]

    def call(self, words: list[str], deadline: Deadline) -> tuple[int, str]:
        """(exit status, what it said on both streams); 124 at the deadline."""
        try:
            done = subprocess.run(
                [self._client, "-p", self.name, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(0.1, deadline.remaining),
                check=False,  # each caller has something to say about it
            )
        except subprocess.TimeoutExpired:
            return 124, f"no answer from {CLIENT} in time ({deadline.label})"
        return done.returncode, done.stdout.decode(errors="replace")
