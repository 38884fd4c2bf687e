"""The units of a nightly timer, by systemd's own rules."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import HarnessError
from harness.farm import timer

HOSTILE = ["a b", 'say "no"', "back\\slash", "100%", "$HOME", "it's", "ünï", ";", "", "-x", "@y"]


def unquoted(line: str) -> list[str]:
    """The words of an ExecStart line as systemd.syntax(7) and systemd.service(5) read them."""
    words, rest = [], line.strip()
    while rest:
        found = re.match(r'"((?:[^"\\]|\\.)*)"|([^\s"\'\\]+)', rest)
        assert found, rest
        word = found[1] if found[1] is not None else found[2]
        word = word.replace('\\"', '"').replace("\\\\", "\\")
        words.append(word.replace("%%", "%").replace("$$", "$"))
        rest = rest[found.end() :].lstrip()
    return words


def made(command: list[str], folder: Path = Path("/srv/farm"), **values: str) -> dict[str, str]:
    return timer.units("harness-nightly", command, folder, values, "02:00")


def value_of(text: str, key: str) -> str:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)[0]


def test_words_come_through_systemds_quoting_as_they_are() -> None:
    text = made(["/usr/bin/python3", *HOSTILE])["harness-nightly.service"]
    assert unquoted(value_of(text, "ExecStart")) == ["/usr/bin/python3", *HOSTILE]


@pytest.mark.parametrize("name", ["a folder", "50%", 'qu"ote', "dollar$x", "ünï"])
def test_a_hostile_folder_and_environment_pass_systemds_own_check(
    name: str, tmp_path: Path
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    folder = tmp_path / name
    folder.mkdir()
    files = made([sys.executable, *HOSTILE], folder, HARNESS_HOME=str(folder))
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(tmp_path / "harness-nightly.timer"),
         str(tmp_path / "harness-nightly.service")],
        capture_output=True, text=True, check=False, timeout=60,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "harness-nightly" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("word", ["a\nExecStart=/bin/sh", "a\rb", "tab\t", "\x00", "\x7f"])
def test_control_characters_never_reach_a_unit(word: str) -> None:
    with pytest.raises(HarnessError, match="control character"):
        made(["/usr/bin/python3", word])
    with pytest.raises(HarnessError, match="control character"):
        made(["/usr/bin/python3"], Path(f"/srv/{word}"))


def test_a_folder_that_would_continue_its_line_is_refused() -> None:
    with pytest.raises(HarnessError, match="cannot hold"):
        made(["/usr/bin/python3"], Path("/srv/end\\"))


@pytest.mark.parametrize("at", ["24:00", "2", "02:60", "02:00\nUnit=x", "nightly"])
def test_a_time_that_is_none_is_refused(at: str) -> None:
    with pytest.raises(HarnessError, match="HH:MM"):
        timer.units("n", ["/bin/true"], Path("/"), {}, at)


@pytest.mark.parametrize("name", ["../evil", "a b", "", "x/y", ".hidden"])
def test_a_name_that_is_no_units_is_refused(name: str) -> None:
    with pytest.raises(HarnessError, match="a timer named"):
        timer.units(name, ["/bin/true"], Path("/"), {}, "02:00")


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv(
        "PATH", str(tmp_path)
    )  # no systemctl: this machine's timers stay as they are
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices.yaml").write_text("boards:\n  v: {virtual: {}, tags: [x]}\n")
    return tmp_path


def test_a_dry_run_prints_the_units_and_writes_nothing(farm: Path) -> None:
    asked = ["nightly", "--tag", "x", "--minutes", "5", "--install", "--at", "3:30", "--dry-run"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "OnCalendar=*-*-* 03:30:00" in done.stdout
    words = unquoted(value_of(done.stdout, "ExecStart"))
    assert words[:5] == [sys.executable, "-P", "-m", "harness.cli.main", "nightly"]
    assert {"--tag=x", "--minutes=5.0", f"--farm={farm}/devices.yaml"} <= set(words)
    assert not (farm / "config").exists()


def test_units_are_written_and_removed_again_and_what_is_left_to_do_is_told(farm: Path) -> None:
    done = CliRunner().invoke(app, ["nightly", "--install", "--timer", "farm-a"])
    assert done.exit_code == 2  # written, but there is no systemctl to start it
    assert "run by hand: systemctl --user daemon-reload; systemctl --user enable" in done.stderr
    folder = farm / "config" / "systemd" / "user"
    assert sorted(path.name for path in folder.iterdir()) == ["farm-a.service", "farm-a.timer"]
    assert f"WorkingDirectory={farm}" in (folder / "farm-a.service").read_text()
    done = CliRunner().invoke(app, ["nightly", "--uninstall", "--timer", "farm-a"])
    assert done.exit_code == 0, done.output
    assert list(folder.iterdir()) == []
    again = CliRunner().invoke(app, ["nightly", "--uninstall", "--timer", "farm-a"])
    assert "nothing to remove" in again.stderr


def test_a_url_to_be_told_is_never_written_into_a_unit(
    farm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_NOTIFY_URL", "json://user:planted-secret@127.0.0.1")
    done = CliRunner().invoke(app, ["nightly", "--install", "--dry-run"])
    assert done.exit_code == 0
    assert "planted-secret" not in done.output


def test_a_mistake_in_the_command_is_told_when_the_timer_is_installed(farm: Path) -> None:
    done = CliRunner().invoke(app, ["nightly", "--install", "--stage", "tinny"])
    assert done.exit_code == 2
    assert "did you mean 'tiny'" in done.stderr
    assert not (farm / "config").exists()
