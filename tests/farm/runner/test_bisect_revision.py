"""`harness bisect revision` as a user gives it: a history with faults planted, a virtual board."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine
from harness.bisect.hunt import Build
from harness.bisect.pytest_trials import PytestTrials
from harness.bisect.session import KIND
from harness.bisect.trials import Result, Trial
from harness.store.searches import Searches
from tests.planted.history import MERGE, SLOWER, UNBUILDABLE, WRONG, planted_history
from tests.planted.repos import Repo

BOARD = "  one: {virtual: {}, engine: {unit: packed}}\n"


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    # 5 % would take a quiet machine; here each step takes twice as long.
    return planted_history(tmp_path_factory.mktemp("history") / "repo", slow_percent=100)


@pytest.fixture
def bisect(lab: Any, history: Repo) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`harness bisect revision …` on the board: exit code and JSON."""
    lab.boards(BOARD)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        repo = ["--repo", str(history.folder), "--json"]
        code, found = lab.command("bisect", "revision", *arguments, *repo).finish(280)
        return code, found

    return run


def test_wrong_results_are_blamed_on_the_commit_that_a_merge_brought_in(
    bisect: Callable[..., tuple[int, dict[str, Any]]], lab: Any
) -> None:
    code, found = bisect(
        "good", "wrong", "--what", "accuracy", "--confidence", "0.9", "--tokens", "16"
    )
    assert code == 0, found
    assert found["outcome"] == "named"
    assert [one["subject"] for one in found["culprits"]] == [WRONG]
    assert found["confidence"] >= 0.8  # that of two lines, one in the other
    assert any(MERGE in note for note in found["notes"])
    assert any("a revert repairs it" in note for note in found["notes"])
    line = found["details"]["levels"][0]["revisions"]
    assert UNBUILDABLE in [one["subject"] for one in line]
    tried = [one["subject"] for one in line if not one["testable"]]
    assert tried in ([], [UNBUILDABLE])  # [] where the search had no need of it
    row = Searches(lab.store).newest(KIND)[0]
    assert row.outcome == "named"
    assert len(Searches(lab.store).trials(row.id)) == found["trials"]
    assert lab.spools() == []
    assert lab.leases.held() == []


def test_a_slower_commit_is_named_by_its_time_per_token(
    bisect: Callable[..., tuple[int, dict[str, Any]]], lab: Any, model_file: Path
) -> None:
    code, found = bisect(
        "good", "slower", "--what", "tpot", "--model", str(model_file), "--repeats", "3",
        "--tokens", "12", "--confidence", "0.9",
    )  # fmt: skip
    assert code == 0, found
    assert [one["subject"] for one in found["culprits"]] == [SLOWER]
    assert found["details"]["effect"] > 0.3
    assert lab.spools() == []


def test_git_bisect_run_finds_the_merge_by_what_is_checked_out(
    lab: Any, history: Repo, tmp_path: Path
) -> None:
    lab.boards(BOARD)
    clone = tmp_path / "clone"
    history.git("clone", "--quiet", str(history.folder), str(clone))
    git = ["git", "-C", str(clone)]
    good = history.git("log", "--format=%H", "--grep=Close the bracket", "main")
    subprocess.run([*git, "bisect", "start", "--first-parent", "wrong", good], check=True)
    done = subprocess.run(
        [*git, "bisect", "run", sys.executable, "-m", "harness.cli.main", "bisect", "revision",
         "--this", "--what", "accuracy", "--tokens", "16", "--repo", str(clone),
         "--farm", str(lab.folder / "devices.yaml")],
        capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(engine.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert MERGE in done.stdout
    assert "is the first bad commit" in done.stdout


TEST = """
import pytest

from harness.deadline import Deadline

pytestmark = pytest.mark.device

def test_it(deployed):
    asked = [*deployed.python, "-c", "import engine.planted"]
    assert deployed.session.run(asked, deadline=Deadline.after(60)).status == 0
"""


def test_a_test_of_ones_own_runs_with_the_engine_of_a_revision(
    lab: Any, history: Repo, model_file: Path, tmp_path: Path
) -> None:
    lab.boards(BOARD)
    (tmp_path / "test_mine.py").write_text(TEST)
    history.git("worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"), "good")
    sources = tmp_path / "tree" / "engine"
    (sources / "planted.py").write_text("HERE = 1\n")  # no other engine has it
    lost: list[Trial] = []
    make = PytestTrials(
        f"{tmp_path / 'test_mine.py'}::test_it",
        "one",
        lab.folder / "devices.yaml",
        tmp_path,
        model=model_file,
        keep=lost.append,
    )
    trial = make("bad", Build("planted", {"folder": "tree"}, lambda: sources))
    assert trial.result is Result.PASS, (tmp_path / "pytest.log").read_text()
    assert lost == []
