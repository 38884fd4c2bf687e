"""Power and console by a place of labgrid: a real coordinator, exporter and client, and a relay and
a serial port on loopback.

HARNESS_TEST_LABGRID names another folder with labgrid's programs, such as /opt/labgrid/bin.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.boards.console import capturing, last_lines
from harness.boards.console.labgrid import serial_port as parse_serial_port
from harness.boards.power import PowerState, Supply
from harness.deadline import Deadline
from harness.errors import BoardError, HarnessError
from harness.inventory import Board

PROGRAMS = os.environ.get("HARNESS_TEST_LABGRID", "") or str(Path(sys.executable).parent)

installed = pytest.mark.skipif(
    shutil.which("labgrid-exporter", path=PROGRAMS) is None, reason="needs the extra labgrid"
)


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


class Relay(http.server.BaseHTTPRequestHandler):
    """What labgrid's model `simplerest` talks to: GET /relay/0/1 switches on, /relay/0 tells."""

    state = "0"
    orders: list[str] = []  # noqa: RUF012 - of one test: the fixture makes a class of its own

    def do_GET(self) -> None:
        words = self.path.strip("/").split("/")
        if len(words) == 3:
            type(self).state = words[2]
            self.orders.append(words[2])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.state.encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def relay() -> Iterator[tuple[type[Relay], int]]:
    kind = type("OneRelay", (Relay,), {"orders": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield kind, server.server_address[1]
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def running(name: str, *arguments: str, folder: Path, ready: str) -> Iterator[None]:
    """A program of labgrid, from the line that says it is ready until the end of the block."""
    log = folder / f"{name}.log"
    command = [str(Path(PROGRAMS) / name), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        until = soon(180)
        while ready not in log.read_text():
            assert process.poll() is None and not until.expired, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.kill()  # it keeps nothing that anybody wants
        process.wait()


@pytest.fixture
def serial_port() -> Iterator[int]:
    """A serial port in the network, that prints a line again and again: what comes before a reader
    is there is lost, as on a wire."""

    class Port(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(0.1)
            with contextlib.suppress(OSError):
                while True:
                    self.request.sendall(b"Kernel panic - not syncing\r\n")
                    with contextlib.suppress(TimeoutError):
                        if not self.request.recv(1):  # the other side ended
                            return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def board(
    relay: tuple[type[Relay], int],
    serial_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Board]:
    """A board whose place `rack` has the relay and the serial port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("LG_COORDINATOR", address)
    monkeypatch.setenv("PATH", PROGRAMS + os.pathsep + os.environ["PATH"])
    (tmp_path / "exporter.yaml").write_text(
        "group:\n  NetworkPowerPort:\n    model: simplerest\n"
        f"    host: 'http://127.0.0.1:{relay[1]}/relay/{{index}}/{{value}}'\n    index: 0\n"
        f"  NetworkSerialPort:\n    host: 127.0.0.1\n    port: {serial_port}\n    protocol: raw\n"
    )
    coordinator = ("labgrid-coordinator", "-l", address)
    exporter = ("labgrid-exporter", "-c", address, "-n", "lab", "exporter.yaml")
    with (
        running(*coordinator, folder=tmp_path, ready="Coordinator ready"),
        running(*exporter, folder=tmp_path, ready="connected to coordinator"),
    ):
        client("create")
        client("add-match", "lab/group/*")
        place = {"driver": "labgrid", "place": "rack"}
        entry = {"name": "rk-01", "host": "h", "power": place, "console": place}
        yield Board.model_validate(entry)


def client(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [str(Path(PROGRAMS) / "labgrid-client"), "-p", "rack", *words],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return done.stdout.decode()


@installed
def test_a_place_is_switched_told_and_given_back(
    board: Board, relay: tuple[type[Relay], int]
) -> None:
    supply = Supply(board, off_s=0)
    assert supply.status(soon()) is PowerState.OFF
    assert supply.on(soon()) is PowerState.ON
    assert relay[0].state == "1"
    assert supply.cycle(soon()) is PowerState.ON
    assert relay[0].orders == ["1", "0", "1"]
    assert "acquired: None" in client("show")


@installed
def test_a_place_that_somebody_else_has_is_not_switched_and_stays_theirs(
    board: Board, relay: tuple[type[Relay], int]
) -> None:
    ann = {"LG_USERNAME": "ann", "LG_HOSTNAME": "desk"}
    client("acquire", **ann)
    supply = Supply(board, settle_s=0)
    with pytest.raises(BoardError, match="acquired by desk/ann") as caught:
        supply.on(soon())
    assert caught.value.kind == "power"
    assert supply.status(soon()) is PowerState.UNKNOWN
    assert relay[0].orders == []
    assert "acquired: desk/ann" in client("show")


@installed
def test_a_place_that_this_user_has_already_is_switched_and_kept(board: Board) -> None:
    client("acquire")
    assert Supply(board).on(soon()) is PowerState.ON
    assert "acquired: None" not in client("show")


@installed
def test_the_console_of_a_place_is_read_beside_its_power_and_given_back(
    board: Board, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with capturing(board, folder):
        until = soon(180)
        while not last_lines(folder) and not until.expired:
            time.sleep(0.05)
        assert Supply(board).on(soon()) is PowerState.ON
        assert "acquired: None" not in client("show")  # switching gave nothing back
    assert last_lines(folder)[0].endswith("Kernel panic - not syncing")
    assert "acquired: None" in client("show")


@installed
def test_a_console_that_somebody_else_has_is_told_where_its_text_would_stand(
    board: Board, tmp_path: Path
) -> None:
    client("acquire", LG_USERNAME="ann", LG_HOSTNAME="desk")
    folder = tmp_path / "run"
    folder.mkdir()
    with capturing(board, folder):
        until = soon(180)
        while not last_lines(folder) and not until.expired:
            time.sleep(0.05)
    assert "cannot be read" in last_lines(folder)[0]
    assert "acquired by desk/ann" in last_lines(folder)[0]


SHOWN = """\
Place 'rack':
  matches:
    lab/group/*
  acquired: lab/ann
Acquired resource 'x' (lab/group/NetworkPowerPort/NetworkPowerPort):
  {'acquired': 'rack',
   'cls': 'NetworkPowerPort',
   'params': {'host': 'pdu', 'index': 0}}
Acquired resource 'y' (lab/group/NetworkSerialPort/NetworkSerialPort):
  {'acquired': 'rack',
   'avail': True,
   'cls': 'NetworkSerialPort',
   'params': {'extra': {'path': '/dev/ttyUSB0'},
              'host': 'lab-host',
              'port': 40001,
              'protocol': 'rfc2217',
              'speed': 1500000}}
"""


def test_the_serial_port_is_found_in_what_labgrid_shows() -> None:
    found = parse_serial_port(SHOWN)
    assert found is not None
    assert (found["host"], found["port"], found["speed"]) == ("lab-host", 40001, 1500000)


@pytest.mark.parametrize("text", ["", SHOWN.replace("NetworkSerialPort/", "x/"), SHOWN[:-30]])
def test_without_a_serial_port_none_is_found(text: str) -> None:
    assert parse_serial_port(text) is None


def test_without_labgrids_client_the_remedy_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    entry = {"name": "rk-01", "host": "h", "power": {"driver": "labgrid", "place": "rack"}}
    with pytest.raises(HarnessError, match=r"no labgrid-client on PATH.*decode-harness\[labgrid\]"):
        Supply(Board.model_validate(entry))
