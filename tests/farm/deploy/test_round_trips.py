"""How often a deployment asks a board: what a farm of hundreds pays for, whatever each costs.

Counted at the boards' end, where nothing that the host does can hide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from harness.boards.null import Counts, NullFleet, null_boards
from harness.boards.probe import probe
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.deploy.bundle import Bundle
from harness.deploy.push import deploy
from tests.farm.detached import detached

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.deploy.push import Deployment
    from harness.inventory import Board

    MakeBundle = Callable[..., Bundle]

BOARDS = 3


class Farm:
    """Null boards, each connected, and probed once."""

    def __init__(self, fleet: NullFleet) -> None:
        self.fleet = fleet
        self.pool = ThreadPoolExecutor(len(fleet.boards))
        self.sessions: list[BoardSession] = list(self.pool.map(self._connect, fleet.boards))
        self.facts = list(self.pool.map(self._probe, self.sessions))

    @staticmethod
    def _connect(board: Board) -> BoardSession:
        return open_session(board, deadline=Deadline.after(60))

    @staticmethod
    def _probe(session: BoardSession) -> Facts:
        return probe(session, deadline=Deadline.after(60))

    def deploy(self, bundle: Bundle, *files: Path) -> list[Deployment]:
        def one(session: BoardSession, facts: Facts) -> Deployment:
            return deploy(session, facts, bundle, list(files), deadline=Deadline.after(120))

        return list(self.pool.map(one, self.sessions, self.facts))

    def asked(self, work: Callable[[], object]) -> list[Counts]:
        """What each board was asked during `work`."""
        before = self.fleet.counts()
        work()
        after = self.fleet.counts()
        return [
            Counts(
                after[name].connections - counts.connections,
                after[name].commands - counts.commands,
                after[name].sftp - counts.sftp,
            )
            for name, counts in before.items()
        ]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.pool.shutdown()


@pytest.fixture
def farm(tmp_path: Path) -> object:
    with null_boards(BOARDS, tmp_path / "nulls") as fleet:
        made = Farm(fleet)
        yield made
        made.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.package"
    path.write_bytes(os.urandom(1 << 20))
    return path


def test_a_deployment_that_changes_nothing_is_one_command_on_one_connection(
    farm: Farm, make_bundle: MakeBundle, model: Path
) -> None:
    bundle = make_bundle()
    first = farm.deploy(bundle, model)
    assert all(len(made.sent_parts) == 4 for made in first)
    asked = farm.asked(lambda: farm.deploy(bundle, model))
    assert asked == [Counts(connections=0, commands=1, sftp=0)] * BOARDS


def test_a_new_engine_is_a_survey_an_upload_and_an_installation(
    farm: Farm, make_bundle: MakeBundle, model: Path
) -> None:
    farm.deploy(make_bundle(b"1"), model)
    asked = farm.asked(lambda: farm.deploy(make_bundle(b"2"), model))
    # A small part travels in one command; the trial is a part of installing it.
    assert asked == [Counts(connections=0, commands=3, sftp=0)] * BOARDS


def test_a_probe_is_one_command(farm: Farm) -> None:
    asked = farm.asked(lambda: list(farm.pool.map(farm._probe, farm.sessions)))
    assert asked == [Counts(connections=0, commands=1, sftp=0)] * BOARDS


def test_libraries_that_stopped_loading_are_found_in_that_one_command(
    farm: Farm, make_bundle: MakeBundle, model: Path
) -> None:
    bundle = make_bundle()
    for made in farm.deploy(bundle, model):
        for path in Path(made.root).rglob("numpy/__init__.py"):
            path.write_bytes(b"\0")
    assert all(len(made.sent_parts) == 3 for made in farm.deploy(bundle, model))


def test_null_boards_answer_from_memory_as_they_did_before(
    farm: Farm, make_bundle: MakeBundle, model: Path
) -> None:
    bundle = make_bundle()
    first = farm.deploy(bundle, model)
    farm.fleet.remember()
    for _ in range(2):
        again = farm.deploy(bundle, model)
        assert [made.root for made in again] == [made.root for made in first]
        assert all(made.sent_bytes == 0 for made in again)
    assert len({made.root for made in first}) == BOARDS
    facts = list(farm.pool.map(farm._probe, farm.sessions))
    homes = [{Path(folder.path).parent.name for folder in found.folders} for found in facts]
    assert homes == [{board.name} for board in farm.fleet.boards]


def test_null_boards_take_what_runs_on_them_along(tmp_path: Path) -> None:
    with null_boards(2, tmp_path / "nulls") as fleet:
        for board in fleet.boards:
            with open_session(board, deadline=Deadline.after(30)) as session:
                session.run(detached("exec sleep 1000"), deadline=Deadline.after(30))
        below = psutil.Process(fleet.pid).children(recursive=True)
        work = [item for item in below if item.name() in ("sh", "sleep")]
        assert len(work) == 2
    assert psutil.wait_procs(below, timeout=5)[1] == []
