"""The command line of the benchmarks."""

from __future__ import annotations

import os

import pytest

from tests.bench import __main__ as command
from tests.bench.results import Row


def test_every_benchmark_says_what_it_measures() -> None:
    assert command.names()[:2] == ["decode-135m", "decode-1b"]
    for name in command.names():
        module = command.load(name)
        assert module.SUMMARY
        assert callable(module.run)


def test_an_unknown_benchmark_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["decode-7b"]) == 2
    assert "no benchmark 'decode-7b'; there are: decode-135m, decode-1b" in capsys.readouterr().err


def test_more_threads_than_processors_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trace", "--threads", str((os.cpu_count() or 1) + 1)]) == 2
    assert "processors are allowed here" in capsys.readouterr().err


def test_trouble_in_one_benchmark_lets_the_others_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: object) -> list[Row]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(command.load("trace"), "run", broken)
    monkeypatch.setattr(
        command.load("passes"), "run", lambda bench: [Row("passes", "a row", "report")]
    )
    assert command.main(["trace", "passes"]) == 2
    out = capsys.readouterr()
    assert "no such luck" in out.out
    assert "a row" in out.out
