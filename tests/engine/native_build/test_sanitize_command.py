"""The command that runs something over sanitised builds says which of them were clean."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from engine.native.build import build_local
from engine.native.compilers import Compiler
from harness.deploy import sanitize

CALL = "import ctypes, os; ctypes.CDLL(os.environ['ENGINE_NATIVE_LIB']).{}()"


@pytest.fixture(autouse=True)
def small_library(
    sources: Path, gcc: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del gcc  # it must be there
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sanitize, "build_local", functools.partial(build_local, sources))


def test_each_sanitiser_runs_the_command_and_the_faulty_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    faulty = [sys.executable, "-c", CALL.format("bad_address")]
    assert sanitize.main(["address", "undefined", "--", *faulty]) == 1
    said = capfd.readouterr()
    assert said.out.strip().startswith("not clean: address (status")
    assert "undefined" not in said.out
    assert "heap-buffer-overflow" in said.err


def test_clean_runs_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    sound = [sys.executable, "-c", CALL.format("macros_generic")]
    assert sanitize.main(["thread", "--", *sound]) == 0
    assert capfd.readouterr().out.strip() == "clean: thread"


def test_an_unknown_sanitiser_runs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["memory"]) == 2
    assert "expected some of address, thread, undefined" in capfd.readouterr().err
