"""What is told while a model is made ready: what is done, and nothing that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from harness.cli.bringup import prepare
from harness.deploy import models
from harness.deploy.cache import sha256_file
from harness.errors import HarnessError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


def test_packing_is_told_once_and_not_when_the_package_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=7), path)
    first = prepare(path)
    assert capsys.readouterr().err == "packing small.gguf\n"
    assert prepare(path).sha256 == first.sha256
    assert capsys.readouterr().err == ""


def test_a_file_that_is_not_there_is_not_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HarnessError, match="no such file"):
        prepare(tmp_path / "none.gguf")
    assert capsys.readouterr().err == ""


def test_a_demonstration_model_that_is_there_is_not_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=7), path)
    monkeypatch.setenv("HARNESS_DEMO_MODEL", str(path))
    monkeypatch.setattr(models, "DEMO_GGUF_SHA256", sha256_file(path))
    prepare(None)
    assert capsys.readouterr().err == "packing small.gguf\n"
