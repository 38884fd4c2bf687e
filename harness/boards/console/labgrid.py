"""The console of a place in a labgrid lab: its NetworkSerialPort, read with pyserial.

The place stays acquired while the console is read: labgrid serves a port to nobody else's place.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.boards.labgrid import CLIENT, LabgridPlace
from harness.errors import BoardError, HarnessError

if TYPE_CHECKING:
    from harness.boards.console.base import ConsoleStream
    from harness.deadline import Deadline
    from harness.inventory import Board

PORT = "NetworkSerialPort"
# As labgrid's own driver does: the port's settings stay the exporter's.
URLS = {
    "rfc2217": "rfc2217://{host}:{port}?ign_set_control&timeout=3",
    "raw": "socket://{host}:{port}",
}
PIECE_BYTES = 64 << 10


class LabgridConsole:
    """Raises HarnessError where labgrid is not installed."""

    def __init__(self, board: Board) -> None:
        if board.console is None or board.console.place is None:
            raise ValueError(f"board {board.name} has no labgrid place for its console")
        self.board, self.place = board, LabgridPlace(board.name, board.console.place)
        try:
            self._serial = importlib.import_module("serial")
        except ImportError as error:
            raise HarnessError(
                "pyserial is not installed",
                where=f"board {board.name}",
                expected="pyserial, by which a console is read",
                remedy="run: pip install 'decode-harness[labgrid]'",
            ) from error

    @contextlib.contextmanager
    def open(self, deadline: Deadline) -> Iterator[ConsoleStream]:
        with self.place.acquired(deadline) as refused:
            code, said = self.place.call(["show"], deadline)
            stranger = "" if code else self.place.stranger(said)
            if stranger:
                # A port that is served to everyone would be read beside them: some give each byte
                # to one reader alone.
                raise self._error(f"it is acquired by {stranger}")
            port = None if code else serial_port(said)
            if port is None or port.get("port") is None:
                words = (refused or said).strip().splitlines() if code or refused else []
                raise self._error(
                    words[-1][:200] if words else f"the place shows no {PORT} that is served"
                )
            url = URLS.get(str(port.get("protocol") or "rfc2217"))
            if url is None:
                raise self._error(f"its protocol is {port.get('protocol')!r}")
            try:
                device = self._serial.serial_for_url(
                    url.format(host=port["host"], port=port["port"]),
                    baudrate=int(port.get("speed") or 115200),
                )
            except (OSError, ValueError) as error:  # serial.SerialException is an OSError
                raise self._error(str(error)) from error
            with contextlib.closing(device):
                yield _Serial(device)

    def _error(self, found: str) -> BoardError:
        return BoardError(
            self.board.name,
            "console",
            f"the console of place {self.place.name} cannot be read: {found}",
            expected=f"a place with a {PORT}, free or acquired by this user",
            remedy=f"see `{CLIENT} -p {self.place.name} show`, and LG_COORDINATOR",
        )


class _Serial:
    def __init__(self, device: Any) -> None:
        self._device = device

    def read(self, wait_s: float) -> bytes | None:
        self._device.timeout = wait_s
        first: bytes = self._device.read(1)
        if not first:
            return b""
        waiting = min(int(self._device.in_waiting), PIECE_BYTES)
        return first + bytes(self._device.read(waiting) if waiting else b"")


def serial_port(shown: str) -> dict[str, Any] | None:
    """The parameters of the first serial port that `labgrid-client show` lists: host, port, speed,
    protocol. None when there is none.

    Each resource is a line that names its class, and below it, indented, a Python literal.
    """
    blocks: list[list[str]] = []
    wanted = False
    for line in shown.splitlines():
        if line.startswith(("Matching resource", "Acquired resource")):
            wanted = f"/{PORT}/" in line
            if wanted:
                blocks.append([])
        elif wanted and line.startswith(" "):
            blocks[-1].append(line)
        else:
            wanted = False
    for block in blocks:
        try:
            told = ast.literal_eval("\n".join(block).strip())
            parameters = dict(told["params"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            continue
        if parameters.get("host"):
            return parameters
    return None


DRIVER = LabgridConsole
