"""`harness bisect revision` where it needs no board: mistakes, and what is seen meanwhile."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.bisect.hunt import Standing
from harness.bisect.showing import View, suspects
from harness.cli.bisect import app
from tests.planted.repos import Repo

run = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))


def command(*arguments: str) -> tuple[int, str]:
    result = run.invoke(app, ["revision", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_two_revisions_are_needed() -> None:
    code, said = command("HEAD")
    assert code == 2
    assert "expected GOOD and BAD" in said


def test_an_unknown_revision_and_a_wrong_word_end_before_anything_is_made(
    repo: Repo, tmp_path: Path
) -> None:
    repo.commit("Begin", {"engine/__init__.py": "x = 1\n"})
    repo.commit("Go on", {"engine/__init__.py": "x = 2\n"})
    (tmp_path / "devices.yaml").write_text("boards:\n  one: {virtual: {}}\n  two: {virtual: {}}\n")
    where = ["--repo", str(repo.folder)]
    assert command("HEAD~9", "HEAD", *where)[0] == 2
    code, said = command("HEAD~1", "HEAD", *where, "--what", "speed", "--board", "one")
    assert code == 2
    assert "crash, accuracy, tpot, rss, or a test" in said
    code, said = command("HEAD~1", "HEAD", *where, "--what", "crash")
    assert code == 2
    assert "2 boards: one, two" in said
    assert not (tmp_path / "home").exists()


def test_git_is_stopped_and_not_misled_when_the_command_itself_is_wrong(tmp_path: Path) -> None:
    code, said = command("--this", "--repo", str(tmp_path))
    assert code == 255
    assert "no engine there" in said


def test_the_likeliest_suspects_come_first(repo: Repo) -> None:
    from harness.bisect.history import History

    for at in range(3):
        repo.commit(f"Step {at}", {"engine/__init__.py": f"x = {at}\n"})
    history = History(repo.folder)
    line = history.line(history.revision("HEAD~2"), history.revision("HEAD"))
    posterior = {line[1].hash: 0.2, line[2].hash: 0.8}
    standing = Standing("search", line[1], 7, posterior, line)
    assert suspects(standing) == [(line[2].name, 0.8), (line[1].name, 0.2)]
    output = io.StringIO()
    with View(Console(file=output, width=100)) as view:
        view.standing(standing)
        view.standing(standing)  # not a second line at once
    assert output.getvalue().count("\n") == 1
    assert "7 trials, search" in output.getvalue()
    assert f"80% {line[2].name}" in output.getvalue()
