"""A harness that is killed or stopped: nothing is lost, nothing repeated, nothing left behind."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from harness.store import RunRow

BOARD = "  v: {virtual: {}}"


@pytest.fixture
def arguments(model_file: Path) -> list[str]:
    """A bring-up whose last stage lasts long enough to be met in it."""
    stages = ["--stage", "tiny", "--stage", "stress", "--stress-minutes", "0.12"]
    return ["bringup", "--model", str(model_file), *stages, "--json"]


def in_stress(lab: Any) -> Any:
    """The stress run, once its engine works."""

    def look() -> Any:
        command = lab.commands[-1]
        assert command.process.poll() is None, command.log.read_text()
        rows = lab.store.frames.runs(stage="stress")
        running = rows[rows["state"] == "running"]
        if running.empty:
            return None
        spools = [path for path in lab.spools() if path.name == running.iloc[-1]["id"]]
        told = [path / "events.jsonl" for path in spools if (path / "events.jsonl").exists()]
        working = any(b'"progress"' in path.read_bytes() for path in told)
        return lab.store.run(running.iloc[-1]["id"]) if working else None

    return lab.wait(look)


def killed_in_stress(lab: Any, arguments: list[str]) -> Any:
    lab.boards(BOARD)
    command = lab.command(*arguments)
    row = in_stress(lab)
    command.kill()
    assert lab.spools(), "the run on the board must outlive the harness"
    return row


def told_end(lab: Any) -> bool:
    return any(b'"run-end"' in (path / "events.jsonl").read_bytes() for path in lab.spools())


@pytest.mark.parametrize("ended", [False, True], ids=["still-running", "ended-meanwhile"])
def test_after_a_kill_the_same_command_collects_the_run_and_repeats_nothing(
    lab: Any, arguments: list[str], ended: bool
) -> None:
    row = killed_in_stress(lab, arguments)
    if ended:
        lab.wait(lambda: told_end(lab))
    code, result = lab.command(*arguments).finish()
    stages = result["boards"]["v"]
    assert code == 0, result
    assert (stages["tiny"]["reused"], stages["stress"]["reused"]) == (True, False)
    assert stages["stress"]["run_id"] == row.id
    rows = lab.store.frames.runs()
    assert list(rows["stage"]) == ["tiny", "stress"]
    assert set(rows["campaign_id"]) == {result["campaign"]}
    assert lab.leases.held() == []
    assert lab.spools() == []
    assert lab.processes() == []


def test_starting_anew_clears_away_what_the_killed_harness_left(
    lab: Any, arguments: list[str]
) -> None:
    row = killed_in_stress(lab, arguments)
    tiny = ["bringup", "--model", arguments[2], "--stage", "tiny", "--json", "--fresh"]
    command = lab.command(*tiny)
    code, result = command.finish()
    assert (code, result["boards"]["v"]["tiny"]["outcome"]) == (0, "pass")
    assert f"ending stress run {row.id[:8]}" in command.log.read_text()
    orphan = lab.store.run(row.id)
    assert (orphan.state, orphan.outcome, orphan.error_kind) == ("judged", "invalid", "abandoned")
    assert lab.spools() == []
    lab.wait(lambda: not [words for words in lab.processes() if "engine" in words])


def test_after_a_change_of_the_engine_the_old_run_is_ended_before_anything_is_measured(
    lab: Any, arguments: list[str]
) -> None:
    row = killed_in_stress(lab, arguments)
    with lab.store.database.writing() as session:  # as if the killed harness had an older engine
        session.execute(sa.update(RunRow).values(engine_hash="0" * 64))
    code, result = lab.command(*arguments).finish()
    stages = result["boards"]["v"]
    assert code == 0, result
    assert result["campaign"] == row.campaign_id
    old, *new = lab.store.campaign_runs(row.campaign_id)[1:]
    assert (old.id, old.error_kind) == (row.id, "abandoned")
    assert "engine was changed" in old.headline
    assert [(run.stage, run.outcome) for run in new] == [("tiny", "pass"), ("stress", "pass")]
    assert all(run.started_at > old.finished_at and run.engine_hash != "0" * 64 for run in new)
    assert stages["stress"]["run_id"] == new[1].id
    assert lab.spools() == []


def test_a_run_that_is_gone_from_the_board_is_closed_and_run_anew_under_another_id(
    lab: Any, arguments: list[str]
) -> None:
    row = killed_in_stress(lab, arguments)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("ENGINE_RUN_ID") == row.id:
                process.kill()
    for spool in lab.spools():
        shutil.rmtree(spool)
    code, result = lab.command(*arguments).finish()
    assert code == 0, result
    old, new = [run for run in lab.store.campaign_runs(row.campaign_id) if run.stage == "stress"]
    assert (old.id, old.outcome, old.error_kind) == (row.id, "error", "board-lost")
    assert "no longer on the board" in old.headline
    assert (new.outcome, new.attempt) == ("pass", 2)
    assert result["boards"]["v"]["stress"]["run_id"] == new.id
    # What the host had copied of the first run is evidence of that run alone.
    assert old.id not in (lab.store.raw_folder(new.id) / "events.jsonl").read_text()


def test_ctrl_c_ends_in_order_and_only_resume_continues(lab: Any, arguments: list[str]) -> None:
    lab.boards(BOARD)
    command = lab.command(*arguments)
    row = in_stress(lab)
    command.interrupt()
    code, result = command.finish()
    assert (code, result["interrupted"]) == (2, True)
    assert result["boards"]["v"]["tiny"]["outcome"] == "pass"
    assert result["boards"]["v"]["stress"]["error_kind"] == "interrupted"
    assert "same command with --resume" in result["boards"]["v"]["stress"]["remedy"]
    assert "SIGINT: ending the runs and cleaning the boards" in command.log.read_text()
    assert lab.store.run(row.id).error_kind == "interrupted"
    assert lab.leases.held() == []
    assert lab.spools() == []
    assert lab.processes() == []
    code, resumed = lab.command(*arguments, "--resume").finish()
    stages = resumed["boards"]["v"]
    assert (code, resumed["campaign"]) == (0, result["campaign"])
    assert (stages["tiny"]["reused"], stages["stress"]["outcome"]) == (True, "pass")
    # It was cancelled, so it ran again.
    assert stages["stress"]["run_id"] != row.id
