"""Null boards from the host's side: started together, counted, ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.inventory import Board

END_S = 20.0


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a board was asked since its start: log-ins, commands, SFTP channels."""

    connections: int
    commands: int
    sftp: int


class NullFleet:
    """Boards that run in one process, which ends with this object or with this process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        told = self._read()
        self.public_host_key = str(told["public_host_key"])
        self.key_file = Path(told["key_file"])
        self.boards = tuple(
            Board(
                name=name,
                host=told["host"],
                port=port,
                user=told["user"],
                host_key=told["host_key"],
                key_file=told["key_file"],
                folders=("~/work",),
                threads=1,
            )
            for name, port in told["ports"].items()
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def counts(self) -> dict[str, Counts]:
        """By board."""
        return {name: Counts(**asked) for name, asked in self._ask("counts").items()}

    def remember(self) -> None:
        """From now on what was answered once is answered from memory: nothing may change on the
        boards any more that a command asks for."""
        self._ask("remember")

    def close(self) -> None:
        """Ends the boards and all that runs on them."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, request: str) -> Mapping[str, Any]:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # told by the missing answer
                self._process.stdin.write(f"{request}\n")
                self._process.stdin.flush()
        return self._read()

    def _read(self) -> Mapping[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise HarnessError(
                f"the null boards ended: {' '.join(said) or 'they said nothing'}",
                remedy=f"see {self._log}",
            )
        answer: Mapping[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def null_boards(count: int, folder: Path) -> Iterator[NullFleet]:
    """`count` boards with their home folders below `folder`, for as long as the context is open.

    Raises HarnessError when they do not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "null-boards.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.boards.null", str(count), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a Ctrl-C here is ours: we end them when we are done
        )
    fleet = None
    try:
        fleet = NullFleet(process, path)
        yield fleet
    finally:
        if fleet is not None:
            fleet.close()
        else:
            process.kill()
            process.communicate()
