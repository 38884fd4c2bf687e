"""`harness nightly` as cron runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.boards.care import Care

NOBODY = "{host: 127.0.0.1, port: 1, host_key: 'SHA256:" + "A" * 43 + "'}"


def test_a_night_without_boards_is_reported_as_trouble_and_compared_with_the_last(
    lab: Any, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARNESS_NOTIFY_URL", raising=False)
    lab.boards(f"  gone: {NOBODY}\n")
    asked = ["nightly", f"--model={model_file}", "--stage=tiny", "--json"]
    code, told = lab.command(*asked).finish()
    assert code == told["exit_code"] == 2
    assert "1 board: 0 passed, 1 in trouble" in told["title"]
    assert told["boards"]["gone"]["tiny"]["error_kind"] == "unreachable"
    text = "\n".join(told["report"])
    assert "gone tiny ERROR (unreachable)" in text
    assert "no night before this one" in text
    assert "nothing is left behind" in text
    _, again = lab.command(*asked).finish()
    assert again["campaign"] != told["campaign"]
    assert again["changes"]["since"] is not None
    assert again["report"][-2].endswith(": nothing")


def test_people_are_told_of_a_night_that_could_not_be_run(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is lost here, since nobody listens; the night's own error is not."""
    monkeypatch.setenv("HARNESS_NOTIFY_URL", "json://user:planted-secret@127.0.0.1:1")
    lab.boards(f"  gone: {NOBODY}\n")
    command = lab.command("nightly", f"--model={tmp_path / 'missing.gguf'}")
    output, _ = command.process.communicate(timeout=120)
    said = command.log.read_text()
    assert command.process.returncode == 2
    assert output == b""
    assert "missing.gguf" in said
    assert "nobody was told: " in said
    assert "planted-secret" not in said


def test_a_board_that_the_harness_set_aside_takes_part_when_it_is_well_again(
    lab: Any, model_file: Path
) -> None:
    lab.boards("  v: {virtual: {}}\n  w: {virtual: {}}\n")
    care = Care(lab.store)
    care.quarantine("v", "it froze")
    care.quarantine("w", "its fan is loose", "ann@desk")
    code, told = lab.command("nightly", f"--model={model_file}", "--stage=tiny", "--json").finish()
    assert code == 2
    assert told["boards"]["v"]["tiny"]["outcome"] == "pass"
    assert care.quarantined("v") is None
    assert told["boards"]["w"]["tiny"]["error_kind"] == "quarantined"  # a person's word stands
