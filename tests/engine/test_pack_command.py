"""`engine pack` with layouts and schemes, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import Package


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=4, width=96, heads=4, kv_heads=2, tied=True), path)
    return path


def test_pack_quantises_to_the_asked_scheme_and_layout(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = model.with_suffix(".pkg")
    words = ["pack", str(model), str(target), "--layout", "interleaved", "--scheme", "w4-64"]
    assert main([*words, "--keep", "embed=w8", "--keep", "L00.*=source"]) == 0
    out, err = capsys.readouterr()
    assert "interleaved" in out and "W4" in out
    assert "96 inputs are no multiple of the 64 that w4-64 needs; quantised to w4-32" in err
    assert "tensors quantised here, relative error" in err
    with Package.open(target) as package:
        kinds = {name: (t.scheme, t.layout, t.group) for name, t in package.tensors.items()}
    assert kinds["L01.ffn.down"] == ("q4", "interleaved", 64)  # 128 inputs
    assert kinds["L01.ffn.up"] == ("q4", "interleaved", 32)
    assert kinds["embed"] == ("q8", "interleaved", 96)
    assert kinds["L00.ffn.down"][0] == "f32"


def test_pack_tells_every_error_as_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = model.with_suffix(".pkg")
    assert main(["pack", str(model), str(target), "--scheme", "w8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == "blocked"
    assert len(told["relative_errors"]) == 2 * 7 + 1
    assert all(0 < error < 0.02 for error in told["relative_errors"].values())


def test_keep_none_quantises_every_matrix(model: Path) -> None:
    target = model.with_suffix(".pkg")
    words = ["pack", str(model), str(target), "--scheme", "w4"]
    assert main([*words, "--keep", "none"]) == 0
    with Package.open(target) as package:
        assert package.tensors["embed"].scheme == "q4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheme", "w4-100"], "scheme is 'w4-100', expected w4 or w8"),
        (["--scheme", "w4", "--keep", "L9.*"], "'L9.*' matches none of the"),
        (["--keep", "embed"], "no scheme is given"),
        (["--scheme", "w4-64", "--strict"], "96 inputs are no multiple of the 64"),
    ],
)
def test_pack_refuses_what_it_cannot_do_and_writes_nothing(
    model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = model.with_suffix(".pkg")
    assert main(["pack", str(model), str(target), *words]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_pack_replaces_a_package_of_an_older_version(model: Path) -> None:
    target = model.with_suffix(".pkg")
    target.write_bytes(b"DECODPK1" + bytes(100))
    assert main(["pack", str(model), str(target)]) == 0
    assert Package.open(target).layout == "blocked"
