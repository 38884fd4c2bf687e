"""`harness plan` from the command line: from a store, from given numbers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from harness.cli.main import app
from harness.store import Store

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=7, layers=3), path)
    return path


def run(*words: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["plan", *(str(word) for word in words)])
    return result.exit_code, result.stdout, result.stderr


def test_a_board_that_is_not_there_yet_is_planned_from_given_numbers(model: Path) -> None:
    code, out, _ = run("--model", model, "--memory-mb", 512, "--bandwidth", 2.5, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["choice"]["weights"] == "w8"
    assert told["memory"]["memory"] == 512 and told["memory"]["source"] == "given"
    assert told["bandwidth"] == {"gb_s": 2.5, "source": "given"}
    row = told["rows"][0]
    assert row["weights"] == "F32 file"
    assert row["ceiling_tokens_per_s_start"] == pytest.approx(2.5e9 / (row["weights_mb"] * 2**20))


def test_nothing_fits_is_a_finding(model: Path) -> None:
    code, out, _ = run("--model", model, "--memory-mb", 60)
    assert code == 1
    assert "Nothing fits" in out and "unknown" in out


def test_memory_and_bandwidth_come_from_what_the_board_told_before(
    model: Path, sample: Any
) -> None:
    with Store.open() as store:
        book = sample.Recorder(store)
        book.campaign("harness", "bringup")
        book.board("here", host="h", facts={"memory_mb": 3000, "available_mb": 10})
        book.run("here", "profile", sample.profile_verdict(1), model="other")
        book.run("here", "curve", sample.curve_verdict(1), model="small")
    code, out, _ = run("--model", model, "--board", "here")
    assert code == 0, out
    assert "3000 MiB (told when it was last used)" in out
    assert "measured by curve run" in out
    assert "measured   W4A16" in out and "tokens/s at the start" in out
    assert "→" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "neither a board nor a memory"),
        (("--board", "nobody"), "devices.yaml"),
        (("--memory-mb", 500, "--context", 100000), "which the model small was made for"),
    ],
)
def test_wrong_use_is_told_with_what_is_expected(
    words: tuple[object, ...], told: str, model: Path
) -> None:
    code, out, err = run("--model", model, *words)
    assert code == 2
    assert told in out + err
