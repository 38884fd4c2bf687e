"""Virtual boards of a test's own: none is found running, none is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from harness.boards import virtual
from harness.boards.virtual import namespace
from harness.boards.virtual.userland import NoUserland, userland
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.inventory import Board


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def needs_emulation() -> Path:
    """The programs of an emulated board; they are fetched where they were never made."""
    try:
        return userland()
    except NoUserland as error:
        pytest.skip(f"needs an emulated userland: {error}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state folder; every board of it is stopped at the end."""
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    yield tmp_path
    virtual.stop_all()
    assert virtual.running() == []


@pytest.fixture
def make_board(request: pytest.FixtureRequest) -> Callable[..., Board]:
    """A virtual board with these options. Skips where the machine cannot be that board."""

    def make(name: str = "virt", **options: Any) -> Board:
        mounted = {"full_disk", "readonly_root", "noexec_tmp", "reboot_at", "isa"} & set(options)
        if mounted and not namespace.supported():
            pytest.skip("needs mount namespaces for this user")
        if "isa" in options:
            needs_emulation()
        return Board.model_validate({"name": name, "virtual": options})

    return make


@pytest.fixture
def connect(make_board: Callable[..., Board]) -> Iterator[Callable[..., BoardSession]]:
    """A session on a new board with these options."""
    sessions: list[BoardSession] = []

    def open_one(name: str = "virt", **options: Any) -> BoardSession:
        session = open_session(make_board(name, **options), deadline=soon())
        sessions.append(session)
        return session

    yield open_one
    for session in sessions:
        session.close()


@pytest.fixture
def plain_client(
    make_board: Callable[..., Board],
) -> Iterator[Callable[..., paramiko.SSHClient]]:
    """A bare SSH client, without what `harness.connect` does about odd boards."""
    clients: list[paramiko.SSHClient] = []

    def open_one(name: str = "virt", **options: Any) -> paramiko.SSHClient:
        endpoint = virtual.ensure_running(make_board(name, **options))
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        client.connect(
            endpoint.host,
            endpoint.port,
            endpoint.user,
            key_filename=str(endpoint.key_file),
            allow_agent=False,
            look_for_keys=False,
        )
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        client.close()
