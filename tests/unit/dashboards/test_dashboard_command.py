from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.dashboard import app
from harness.store import Store

runner = CliRunner()


@pytest.fixture
def results(store: Store, sample: Any, tmp_path: Path) -> str:
    """The path of a store with one campaign."""
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("b1", "tiny", sample.tiny_verdict())
    book.finish(sample.Outcome.PASS)
    return str(tmp_path / "store" / "results.sqlite")


def test_build_prints_the_page_on_stdout_and_the_counts_on_stderr(
    results: str, tmp_path: Path
) -> None:
    out = tmp_path / "site"
    answer = runner.invoke(app, ["build", "--store", results, "--out", str(out)])
    assert answer.exit_code == 0
    assert answer.stdout.strip() == str(out / "index.html")
    assert "6 pages" in answer.stderr


def test_build_tells_programs_what_it_wrote(results: str, tmp_path: Path) -> None:
    arguments = ["build", "--store", results, "--out", str(tmp_path / "site"), "--json"]
    first = json.loads(runner.invoke(app, arguments).stdout)
    second = json.loads(runner.invoke(app, arguments).stdout)
    everything = json.loads(runner.invoke(app, [*arguments, "--all"]).stdout)
    assert first["pages"] == 6
    assert (second["written"], second["unchanged"]) == (0, first["written"])
    assert everything["written"] == first["written"]


def test_the_pages_go_to_the_state_folder_by_default(
    results: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "state"))
    answer = runner.invoke(app, ["build", "--store", results])
    assert answer.stdout.strip() == str(tmp_path / "state" / "dashboard" / "index.html")


def test_a_folder_with_other_contents_ends_with_2_and_one_message(
    results: str, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    answer = runner.invoke(app, ["build", "--store", results, "--out", str(tmp_path / "full")])
    assert answer.exit_code == 2
    assert "mine.txt" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_serve_listens_on_loopback_and_ends_on_interrupt(results: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from harness.cli.dashboard import app; app()"]
    command += ["serve", "--port", "0", "--json", "--store", results]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "site")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads("".join(process.stdout.readline() for _ in range(4)))
            assert told["url"].startswith("http://127.0.0.1:")
            with urllib.request.urlopen(told["url"], timeout=10) as answer:
                assert b"decode harness" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["build", "serve"])
def test_help_has_examples(command: str) -> None:
    answer = runner.invoke(app, [command, "--help"])
    assert "Examples" in answer.stdout
    assert f"harness dashboard {command}" in answer.stdout


@pytest.mark.parametrize("command", ["build", "serve"])
def test_without_results_nothing_is_made_and_it_says_what_to_do(
    command: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "typo.sqlite", tmp_path / "site"
    answer = runner.invoke(app, [command, "--store", str(path), "--out", str(out)])
    assert answer.exit_code == 2
    assert f"{path}: there are no results yet" in answer.stderr
    assert list(tmp_path.iterdir()) == []
