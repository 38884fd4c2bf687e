"""Virtual boards to deploy to, and a small bundle that needs no registry."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.boards import virtual
from harness.boards.facts import Facts
from harness.boards.probe import probe
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.deploy.bundle import Bundle, Part, plain_tar
from harness.deploy.push import Deployment, deploy
from harness.inventory import Board

# As much of the real libraries as the check after unpacking uses.
NUMPY = b"class ones:\n def __init__(s, *a): pass\n def __matmul__(s, o): return s\n"


class Target:
    """A virtual board, its facts, and what was said while deploying to it."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.session: BoardSession = open_session(board, deadline=Deadline.after(30))
        self.facts: Facts = probe(self.session, deadline=Deadline.after(30))

    @property
    def home(self) -> Path:
        return virtual.board_folder(self.board.name) / "home"

    def deploy(self, bundle: Bundle, *files: Path, **options: Any) -> Deployment:
        options.setdefault("deadline", Deadline.after(120))
        return deploy(self.session, self.facts, bundle, list(files), **options)

    def reconnect(self) -> None:
        self.session.close()
        self.session = open_session(self.board, deadline=Deadline.after(30))

    def run(self, script: str) -> str:
        """What a shell script says on the board."""
        result = self.session.run(script, deadline=Deadline.after(30))
        return result.stdout.decode() + result.stderr.decode()


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Callable[..., Target]]:
    """Make a virtual board: `target(full_disk=True, folders=("/tmp/x",))`; or take a real one."""
    made: list[Target] = []

    def make(
        folders: tuple[str, ...] = ("~/work",), board: Board | None = None, **faults: Any
    ) -> Target:
        if board is None:
            board = Board(name=f"deploy-{uuid.uuid4().hex[:8]}", virtual=faults)
        made.append(Target(board.model_copy(update={"folders": folders})))
        return made[-1]

    yield make
    for item in made:
        item.session.close()
        if item.board.virtual is not None:
            virtual.stop(item.board)


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Bundle]:
    """Parts as `build_bundle` makes them, with next to nothing in them."""

    def make(marker: bytes = b"1", numpy: bytes = NUMPY) -> Bundle:
        contents = {
            "engine": [("engine/__init__.py", b"version = " + marker + b"\n")],
            "numpy 0": [("numpy/__init__.py", numpy)],
            "psutil 0": [("psutil/__init__.py", b"")],
        }
        parts = []
        for name, files in contents.items():
            data = plain_tar(files)
            digest = hashlib.sha256(data).hexdigest()
            path = tmp_path / f"{digest}.tar"
            path.write_bytes(data)
            kind = "engine" if name == "engine" else "wheel"
            parts.append(Part(name, kind, path, digest, len(data), len(data)))  # type: ignore[arg-type]  # one of the two
        return Bundle(tuple(parts), hashlib.sha256(marker).hexdigest())

    return make
