"""`harness results` as a user types it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.cli.results import app
from harness.store import Store
from harness.verdicts import Outcome


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_newest_verdicts_are_shown_with_what_changed(
    harness: Callable[..., Result], add_run: Callable[..., str]
) -> None:
    add_run(board="rk-01", outcome=Outcome.PASS)
    run_id = add_run(board="rk-01", outcome=Outcome.FAIL)
    result = harness("show")
    assert result.exit_code == 0
    for part in ("rk-01", "curve", "fail (was pass)", "decode is too slow", run_id[:8]):
        assert part in result.stdout
    rows = json.loads(harness("show", "--json").stdout)
    assert [(row["board"], row["outcome"], row["changed"]) for row in rows] == [
        ("rk-01", "fail", True)
    ]


def test_filters_choose_runs_and_all_shows_every_one(
    harness: Callable[..., Result], add_run: Callable[..., str], store: Store
) -> None:
    add_run(board="rk-01")
    campaign = store.begin_campaign("bringup", ["harness"], {})
    add_run(campaign, board="rk-01")
    add_run(campaign, board="rk-02", stage="tiny")
    assert len(json.loads(harness("show", "--json", "--all").stdout)) == 3
    assert len(json.loads(harness("show", "--json", "-c", "last").stdout)) == 2
    rows = json.loads(harness("show", "--json", "-c", campaign[:8], "-b", "rk-02").stdout)
    assert [(row["board"], row["stage"]) for row in rows] == [("rk-02", "tiny")]


def test_one_run_is_shown_with_its_checks(
    harness: Callable[..., Result], add_run: Callable[..., str]
) -> None:
    run_id = add_run()
    result = harness("show", run_id[:8])
    assert result.exit_code == 0
    for part in ("L07.ffn.down", "quantise the KV cache", "tokens_per_s_at_end", "12", "equal"):
        assert part in result.stdout
    whole = json.loads(harness("show", run_id[:8], "--json").stdout)
    assert whole["details"]["points"] == [1, 2.5]
    assert [check["limit"] for check in whole["checks"]] == [12.0, None]
    assert [series["name"] for series in whole["series"]] == ["events", "tokens"]


def test_text_of_a_board_is_no_markup_and_no_control_sequence(
    harness: Callable[..., Result], store: Store
) -> None:
    from harness.verdicts import Verdict

    campaign = store.begin_campaign("bringup", ["harness"], {})
    run_id = store.begin_run(campaign_id=campaign, board="[red]", stage="tiny")
    store.finish_run(run_id, Verdict(outcome=Outcome.FAIL, headline="[bold]x\x1b[2J"))
    for arguments in (["show"], ["show", run_id]):
        text = harness(*arguments).stdout
        assert "[red]" in text
        assert "[bold]x\\x1b[2J" in text


def test_a_name_without_results_is_refused_with_those_there_are(
    harness: Callable[..., Result], add_run: Callable[..., str]
) -> None:
    add_run(board="rk-01")
    result = harness("show", "--board", "rk-1")
    assert result.exit_code == 2
    assert "no results of the board 'rk-1'" in result.stderr
    assert "rk-01" in result.stderr
    assert result.stdout == ""


def test_without_results_the_remedy_is_told_and_no_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    for arguments in (["show"], ["export", str(tmp_path / "runs.csv")]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "harness bringup" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_export_writes_the_file_and_tells_how_much(
    harness: Callable[..., Result], add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run(board="rk-01")
    add_run(board="rk-02")
    result = harness("export", tmp_path / "checks.csv", "--table", "checks", "-b", "rk-02")
    assert result.exit_code == 0
    assert "2 checks" in result.stderr
    told = json.loads(harness("export", tmp_path / "runs.json", "--json").stdout)
    assert told["rows"] == 2
    assert len(json.loads(Path(told["path"]).read_text())) == 2


def test_a_wrong_format_or_table_is_one_message(
    harness: Callable[..., Result], add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run()
    for arguments in (["runs.xml"], ["runs.csv", "--table", "boards"]):
        result = harness("export", tmp_path / arguments[0], *arguments[1:])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert "expected" in result.stderr


def test_a_dash_exports_to_stdout_and_tells_the_count_on_stderr(
    harness: Callable[..., Result],
    add_run: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    add_run(board="rk-01")
    before = sorted(tmp_path.iterdir())
    result = harness("export", "-", "--format", "csv")
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["board"] for row in rows] == ["rk-01"]
    assert "1 run on stdout" in result.stderr
    assert json.loads(harness("export", "-", "--format", "json").stdout)[0]["board"] == "rk-01"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--format", "parquet"], "Parquet is no text"),
        ([], "stdout has no ending"),
        (["--format", "csv", "--json"], "both want stdout"),
    ],
)
def test_what_cannot_go_to_stdout_is_refused(
    options: list[str],
    told: str,
    harness: Callable[..., Result],
    add_run: Callable[..., str],
) -> None:
    add_run()
    result = harness("export", "-", *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


def test_a_pipe_is_written_to_and_stays_a_pipe(
    harness: Callable[..., Result], add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run(board="rk-01")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = harness("export", pipe, "--format", "json")
        assert result.exit_code == 0
        assert json.loads(os.read(reader, 1 << 20))[0]["board"] == "rk-01"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_link_stays_a_link_when_it_is_written_through(
    harness: Callable[..., Result], add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run(board="rk-01")
    target, link = tmp_path / "target", tmp_path / "stdout"
    target.write_text("old and longer than nothing")
    link.symlink_to(target)
    assert harness("export", link, "--format", "json").exit_code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())[0]["board"] == "rk-01"


def test_a_missing_folder_is_named_and_not_made(
    harness: Callable[..., Result], add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run()
    result = harness("export", tmp_path / "mistyped" / "runs.csv")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'mistyped'}: there is no such folder")
    assert not (tmp_path / "mistyped").exists()
