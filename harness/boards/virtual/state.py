"""What a running virtual board leaves on disk so that any process of its user finds it again.

state_dir()/boards/NAME/        mode 0700
    state.json      who runs, on which port, with which key; written last, renamed into place
    off             while it is switched off
    lock            held while a board is started or stopped
    host_key, client_key, server.log, home/
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from harness.boards.virtual.processes import start_of

FORMAT = 1
STATE, LOCK, LOG, HOME, OFF = "state.json", "lock", "server.log", "home", "off"
HOST_KEY, CLIENT_KEY, OTHER_HOST_KEY = "host_key", "client_key", "host_key.other"


@dataclasses.dataclass(frozen=True)
class State:
    """One life of a board's server. `start` is `processes.start_of(pid)`; options are a digest."""

    name: str
    pid: int
    start: str
    host: str
    port: int
    user: str
    host_key: str  # SHA256:…
    options: str
    format: int = FORMAT

    @property
    def alive(self) -> bool:
        """True when the very process that wrote this runs."""
        return start_of(self.pid) == self.start

    def write(self, folder: int) -> None:
        """Atomically, into the folder open as the descriptor `folder`.

        A descriptor, since the board may have made its own view of the file system read-only.
        """
        temporary = f"{STATE}.{self.pid}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(self), file)
        os.replace(temporary, STATE, src_dir_fd=folder, dst_dir_fd=folder)

    @staticmethod
    def read(folder: Path) -> State | None:
        """None where no board was started, or where another version left its file."""
        try:
            raw = json.loads((folder / STATE).read_text())
            return State(**raw) if raw.get("format") == FORMAT else None
        except (OSError, ValueError, TypeError, AttributeError):
            return None
