"""`harness results event` and `harness results alerts` as a user gives them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.boards.care import EVENT, Care
from harness.cli.main import app
from harness.store import Store
from harness.store.alerts import Alert, Alerts

runner = CliRunner()


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    path = tmp_path / "devices.yaml"
    path.write_text("boards:\n  a: {virtual: {}}\n  b: {virtual: {}}\n")
    return path


def test_an_event_is_declared_on_named_boards_or_on_all(farm: Path) -> None:
    told = runner.invoke(app, ["results", "event", "new kernel", "-b", "a", "--farm", str(farm)])
    assert told.exit_code == 0, told.stderr
    again = ["results", "event", "moved", "--all", "--farm", str(farm), "--json"]
    assert json.loads(runner.invoke(app, again).stdout)["boards"] == ["a", "b"]
    with Store.open() as store:
        care = Care(store)
        events = {name: [e.told for e in care.events(name, kind=EVENT)] for name in "ab"}
    assert [len(events["a"]), len(events["b"])] == [2, 1]
    assert events["a"][1].startswith("new kernel (declared by ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new kernel"], "--board NAME, or --all"),
        (["new kernel", "--all", "-b", "a"], "--board NAME, or --all"),
        (["new kernel", "-b", "c"], "c"),
        ([" ", "--all"], "an event without words"),
    ],
)
def test_an_event_needs_boards_and_words(words: list[str], said: str, farm: Path) -> None:
    told = runner.invoke(app, ["results", "event", *words, "--farm", str(farm)])
    assert told.exit_code == 2
    assert said in told.stderr


def test_suspects_are_listed_with_how_often_the_screen_was_right(farm: Path) -> None:
    del farm
    at = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
    alert = Alert(
        "screen", "a", "curve", "tpot_end", "s" * 64, "c", "r", at, 50.0, 55.0, 0.1, 0.001, 9,
        None, None, "undecided", "not decided: there was no A/B", None, None,
    )  # fmt: skip
    with Store.open() as store:
        name = Alerts(store).add(alert)
    told = runner.invoke(app, ["results", "alerts"])
    assert f"{name[:8]}  2026-03-01  a  time per token at the end" in told.stdout
    assert "+10.0%  undecided: not decided" in told.stdout
    assert "screen: 1 suspects, none decided yet, 1 open" in told.stdout
    settled = json.loads(
        runner.invoke(app, ["results", "alerts", "--wrong", name[:6], "--json"]).stdout
    )
    assert settled["alerts"][0]["right"] is False
    assert settled["detectors"][0]["precision"] == 0.0
    assert runner.invoke(app, ["results", "alerts", "--right", "zzzz"]).exit_code == 2
