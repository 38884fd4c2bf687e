"""What a board's serial console prints is kept while something runs."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from harness.boards.console import CONSOLE_NAME, capturing, last_lines
from harness.boards.console import capture as capture_module
from harness.deadline import Deadline
from harness.inventory import Board


def board(command: str) -> Board:
    entry = {"name": "rk-01", "host": "h", "console": {"command": command}}
    return Board.model_validate(entry)


def wait_for(text: str, folder: Path) -> str:
    until = Deadline.after(30)
    path = folder / CONSOLE_NAME
    while not until.expired:
        if path.is_file() and text in path.read_text("utf-8"):
            break
        time.sleep(0.02)
    return path.read_text("utf-8")


def test_lines_are_kept_with_their_time_and_without_what_would_drive_a_terminal(
    tmp_path: Path,
) -> None:
    command = r"printf 'U-Boot\r\n\033[31mred\033[0m \377 \a\n%s' $HARNESS_BOARD; exec sleep 600"
    with capturing(board(command), tmp_path):
        wait_for("red", tmp_path)
    lines = (tmp_path / CONSOLE_NAME).read_text("utf-8").splitlines()
    assert [line[11:] for line in lines] == ["U-Boot", "red \ufffd ", "rk-01"]
    assert all(float(line[:10]) >= 0 for line in lines)


def test_nothing_of_the_command_lives_on(tmp_path: Path) -> None:
    with capturing(board("sleep 6543 & echo child $!; wait"), tmp_path):
        pid = int(wait_for("child", tmp_path).split()[-1])
        assert psutil.pid_exists(pid)
    until = Deadline.after(10)
    while psutil.pid_exists(pid) and not until.expired:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)


def test_a_console_that_ends_is_opened_again_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "REOPEN_S", 0.05)
    with capturing(board("date +%s%N"), tmp_path):
        until = Deadline.after(30)
        while len(last_lines(tmp_path, 100)) < 5 and not until.expired:
            time.sleep(0.02)
    lines = [line[11:] for line in last_lines(tmp_path, 100)]
    assert len([line for line in lines if line.isdigit()]) >= 4
    assert lines.count("[the console ended]") == 1


def test_of_a_console_that_prints_for_ever_the_newest_is_kept(tmp_path: Path) -> None:
    command = "seq -f 'line %.0f of many that a board prints' 1 200000; exec sleep 600"
    with capturing(board(command), tmp_path):
        wait_for("line 200000 ", tmp_path)
    text = (tmp_path / CONSOLE_NAME).read_text("utf-8")
    assert len(text) < 3 * capture_module.LIMIT_BYTES
    assert text.startswith("[older lines were dropped]")
    assert "line 200000 of many" in last_lines(tmp_path)[-1]


def test_a_board_without_a_console_has_no_file(tmp_path: Path) -> None:
    with capturing(Board.model_validate({"name": "rk-01", "host": "h"}), tmp_path):
        pass
    assert last_lines(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
