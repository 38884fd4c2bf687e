"""Secrets that a bring-up uses or merely sees are in nothing that it leaves or says."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.connect.dial import password_variable

PASSWORD, PASSPHRASE = "hunter2-Password", "open-Sesame-9"
TOKEN, ADDRESS = "tok-Planted-0123", "reg-Planted-77"
SECRETS = (PASSWORD, PASSPHRASE, TOKEN, ADDRESS)


def entry(server: Any, folder: Path) -> str:
    """A real server as a board of a devices.yaml."""
    board = server.board
    return (
        f"{{host: '{board.host}:{board.port}', user: {board.user}, host_key: '{board.host_key}', "
        f"key_file: '{board.key_file}', folders: ['{folder}']}}"
    )


def files_with_secrets(*folders: Path) -> list[tuple[str, str]]:
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            except OSError:  # gone meanwhile
                continue
            found += [(str(path), secret) for secret in SECRETS if secret.encode() in data]
    return found


def test_no_secret_is_in_a_log_an_error_the_store_the_spool_or_a_page(
    lab: Any,
    servers: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    locked, closed = servers.sshd(), servers.sshd()
    key = str(locked.folder / "id")
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", PASSPHRASE, "-f", key], check=True)
    (closed.folder / "authorized_keys").write_text("")
    monkeypatch.setenv(password_variable("locked"), PASSPHRASE)
    monkeypatch.setenv(password_variable("closed"), PASSWORD)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://ann:{ADDRESS}@127.0.0.1:9/simple")
    work = tmp_path / "work"
    boards = lab.boards(
        f"  locked: {entry(locked, work)}\n  closed: {entry(closed, tmp_path / 'none')}\n"
        "  virt: {virtual: {}}\n"
    )
    on_boards: list[tuple[str, str]] = []
    spools: set[str] = set()

    def look(board: str, stage: str, fraction: float | None) -> None:
        if stage == "tiny" and fraction is not None:
            runs = [*lab.spools(), *work.glob("runs/*")]
            spools.update(path.name for path in runs)
            on_boards.extend(files_with_secrets(*runs))

    reporter = lab.recorder(look)
    result = lab.run(boards, stages=["tiny"], reporter=reporter)
    outcomes = {name: lab.outcomes(result, name)["tiny"] for name in ("locked", "closed", "virt")}
    assert outcomes == {"locked": "pass", "closed": "error", "virt": "pass"}, result.as_json()
    assert result.results["closed"]["tiny"].error_kind == "auth"
    assert len(spools) == 2  # they were looked at
    assert on_boards == []
    lab.store.close()

    said = [caplog.text, repr(result.as_json()), *reporter.notes]
    for name in ("locked", "closed", "virt"):
        said += result.results[name]["tiny"].explain()
    for words in (
        ("boards", "why", "closed", "locked"),
        ("boards", "probe", "closed", "locked"),
        ("results", "export", str(tmp_path / "runs.json")),
        ("dashboard", "build", "--out", str(tmp_path / "pages")),
    ):
        command = [sys.executable, "-m", "harness.cli.main", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.stdout + done.stderr
        said.append(done.stdout + done.stderr)
    assert (tmp_path / "pages" / "index.html").exists()
    assert [secret for secret in SECRETS for text in said if secret in text] == []
    # Results, raw files, boards with their logs, pages, exports: all that is below the folder.
    assert files_with_secrets(tmp_path) == []
