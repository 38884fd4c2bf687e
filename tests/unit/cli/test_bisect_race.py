"""`harness bisect race` without a board: wrong use, and what is on screen meanwhile."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.bisect.race import RaceSearch, Verdict
from harness.bisect.race_board import Told
from harness.cli import race_view
from harness.cli.main import app
from tests.planted.worlds import Planted, World, steps_of


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--held-back", "L00.attn.q"], "--held-back without --try"),
        (["--board-env", "v:ENGINE_FAULT=drop-edge@L77.attn.out"], "no op 'L77.attn.out'"),
        (["--board-env", "v:ENGINE_FAULT=drop-edge@L00.attn.out+L77.x"], "no op 'L77.x'"),
        (["--board-env", "v:ENGINE_FAULT=lose-edge@L00.attn.out"], "lose-edge"),
        (["--delta", "0.9"], "--delta"),
    ],
)
def test_wrong_use_is_told_before_a_board_is_touched(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    (tmp_path / "devices.yaml").write_text("boards:\n  v: {host: 192.0.2.1}\n")
    farm = ["--farm", str(tmp_path / "devices.yaml")]
    result = CliRunner().invoke(app, ["bisect", "race", "--board", "v", *farm, *words])
    assert result.exit_code == 2
    assert told in result.output


def test_the_screen_shows_the_newest_trials_and_the_likeliest_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(race_view, "console", lambda: console)
    steps = steps_of(40)
    world = World(steps, [Planted(frozenset({steps[17]}), 0.9)], random.Random(1))
    search = RaceSearch(steps)
    with race_view.RaceView(500) as view:
        watch = view.watch()
        while search.trials < 14:
            question = search.ask()
            assert not isinstance(question, Verdict)
            watch.asked(search, question)
            told = Told(*world.trial(question.configuration), None)
            search.tell(told.result, told.signature)
            watch.told(search, question, told)
    text = shown.getvalue()
    assert "14 of at most 500 trials" in text
    assert "FFF" in text
    assert "s017" in text
    assert "█" in text
