"""The folders of the harness: made on demand, and one message where that is impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import HarnessError
from harness.paths import cache_dir, existing_state_dir, state_dir


def test_folders_are_made_on_demand_and_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    assert existing_state_dir() == tmp_path / "home"
    assert list(tmp_path.iterdir()) == []
    for folder in (state_dir(), cache_dir("models")):
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert existing_state_dir() == state_dir()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_that_cannot_be_made_is_named_with_its_variable(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / below
    monkeypatch.setenv("HARNESS_HOME", str(place))
    monkeypatch.setenv("HARNESS_CACHE", str(place))
    with pytest.raises(HarnessError, match=r"cannot be made: .*; set HARNESS_HOME to") as caught:
        state_dir()
    assert caught.value.where == str(place)
    with pytest.raises(HarnessError, match=r"cannot be made: .*; set HARNESS_CACHE to") as caught:
        cache_dir("models")
    assert caught.value.where == str(place / "models")


@pytest.mark.parametrize(
    "command",
    [
        ["results", "show"],
        ["dashboard", "build"],
        ["bringup"],
    ],
    ids=" ".join,
)
def test_commands_answer_a_file_in_place_of_their_folders_with_one_message(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.write_text("not a folder")
    (tmp_path / "devices.yaml").write_text("boards:\n  virt-1:\n    virtual: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_HOME", str(home))
    monkeypatch.setenv("HARNESS_CACHE", str(home))
    monkeypatch.delenv("HARNESS_DEMO_MODEL", raising=False)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    (told,) = result.stderr.splitlines()
    assert told.startswith(f"error: {home}")
    assert "set HARNESS_" in told


def test_looking_at_results_leaves_no_folder_in_a_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARNESS_HOME", raising=False)
    for command in (["results", "show"], ["results", "export", "runs.csv"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "harness bringup" in result.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "devices.yaml").write_text("boards:\n  virt-1:\n    virtual: {}\n")
    assert CliRunner().invoke(app, ["boards", "list"]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["devices.yaml"]
