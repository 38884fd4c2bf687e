"""Messages, results and exit codes of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from engine.formats.checkpoint import FormatError
from harness.cli.main import NOUNS, app
from harness.cli.output import emit_json, guard, visible
from harness.errors import BoardError, HarnessError

runner = CliRunner()


@pytest.mark.parametrize(
    "error",
    [
        HarnessError(
            "found [red]x[/red] at fe80:ab:1", where="a.yaml:3", expected="y", remedy="do z"
        ),
        BoardError("one", "auth", "refused"),
        FormatError("field"),
    ],
)
def test_an_error_that_a_user_can_mend_is_one_message_and_exit_code_2(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    @guard
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {error}\n"


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), guard():
        _ = 1 // 0


def test_ctrl_c_ends_with_exit_code_2() -> None:
    with pytest.raises(typer.Exit) as ended, guard():
        raise KeyboardInterrupt
    assert ended.value.exit_code == 2


def test_control_characters_of_a_board_are_made_visible() -> None:
    assert visible("a\x1b[31m\x00\u202e\n\tü") == "a\\x1b[31m\\x00\\u202e\n\tü"


def test_json_results_hold_numpy_numbers_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"number": np.float32(1.5), "path": Path("a/b"), "items": ("x", {"y"})})
    told = json.loads(capsys.readouterr().out)
    assert told == {"number": 1.5, "path": "a/b", "items": ["x", ["y"]]}


def test_help_lists_every_command_and_the_exit_codes() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in NOUNS:
        assert f"\n  {name} " in result.stdout
    assert "Exit codes" in result.stdout


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys; from harness.cli.main import app\n"
        "try: app([sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pandas', 'paramiko', 'pydantic', 'sqlalchemy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    for option in ("--help", "--version"):
        command = [sys.executable, "-c", script, option]
        assert subprocess.run(command, check=True, capture_output=True).stderr == b"[]\n"


@pytest.mark.parametrize("name", [name for name in NOUNS])
def test_every_command_explains_itself(name: str) -> None:
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_a_mistyped_command_is_wrong_use_and_names_the_near_one() -> None:
    result = runner.invoke(app, ["bringupp"])
    assert result.exit_code == 2
    assert "'bringup'" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bringup", "--farm", "none.yaml"], "none.yaml: no such file"),
        (["bringup", "--board", "virt-9"], "no board 'virt-9'"),
        (["bringup", "--stage", "acuracy"], "no stage 'acuracy'"),
        (["bringup", "--resume", "--fresh"], "--resume together with --fresh"),
        (["bringup", "--model", "none.gguf"], "none.gguf"),
        (["stress", "--board-env", "x"], "BOARD:KEY=VALUE"),
    ],
)
def test_wrong_use_is_one_message_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("devices.yaml").write_text("boards:\n  virt-1: {virtual: {}}\n")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
