"""`engine generate` and `engine pack` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands import main
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=3), path)
    return path


def test_generate_tells_text_tokens_and_times_as_json(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), "-p", "Hello", "-n", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tokens"]) <= 5
    assert told["finish"] in ("length", "stop")
    assert told["ttft_s"] > 0
    assert len(list((model.parent / "cache" / "packages").iterdir())) == 1


def test_generate_is_the_same_from_a_model_file_and_from_its_package(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = model.with_suffix(".pkg")
    assert main(["pack", str(model), str(package)]) == 0
    capsys.readouterr()
    texts = []
    for path in (model, package):
        assert main(["generate", str(path), "-p", "Hello", "-n", "8", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "x", "-n", "0"], "--max-new is 0"),
        (["-p", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["-p", "a long prompt", "--context", "4"], "exceed the context of 4"),
        (["-p", "x", "--unit", "npu"], "'npu' is not known"),
        (["-p", "x", "--threads", "0"], "--threads is 0"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1 and told.out == ""


def test_a_planted_nan_is_a_finding(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L01.ffn.down")
    assert main(["generate", str(model), "-p", "x", "-n", "3"]) == 1
    assert "op L01.ffn.down" in capsys.readouterr().err


def test_pack_never_replaces_what_is_no_package(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = model.read_bytes()
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    for target, message in (
        (model, "is the model itself"),
        (notes, "--force replaces it"),
        (tmp_path, "no regular file"),
        (tmp_path / "no" / "x.pkg", "make it first"),
    ):
        assert main(["pack", str(model), str(target)]) == 2
        assert message in capsys.readouterr().err
    assert model.read_bytes() == before
    assert notes.read_text() == "keep me"
    assert main(["pack", str(model), str(notes), "--force"]) == 0


def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "engine", "generate", str(model), "-p", "x", "-n", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(5)) == 5
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert b"Broken pipe" not in told
    assert b"Traceback" not in told


def test_stdin_that_is_no_text_is_told(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "generate", str(model), "-p", "-"],
        input=b"a\xff",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"stdin is not UTF-8 text" in done.stderr
