"""Putting the engine and models on a board: probe, bundle, deploy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from harness.boards.probe import probe
from harness.deadline import Deadline
from harness.deploy.bundle import build_bundle
from harness.deploy.push import Deployment, deploy
from harness.errors import BoardError
from harness.jobs.engines import may_fall_back, wants_native
from harness.jobs.lifecycle import RemoteRun

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.connect import BoardSession
    from harness.deploy.bundle import Bundle
    from harness.deploy.models import PreparedModel
    from harness.deploy.native import NativeBuild
    from harness.inventory import Board, Engine
    from harness.store import RunRow, Store

PROBE_S = 60.0
DEPLOY_S = 1800.0  # a model over a slow link

Tell = Callable[[str, float | None], None]  # (what is done now, the share that is done)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A board with the engine and the models on it."""

    facts: Facts
    engine_hash: str
    deployment: Deployment
    why_not_native: str | None = None  # a sentence, where the board has no native code
    native: NativeBuild | None = None

    def run(self, run_id: str) -> RemoteRun:
        """Where a run of that id lies on the board, whether it is there or not."""
        return RemoteRun(run_id, f"{self.deployment.root}/runs/{run_id}", self.deployment)

    def run_of(self, row: RunRow) -> RemoteRun:
        """Where a recorded run lies: in the work folder of its own time, which may be another."""
        if row.remote_spool is None:
            return self.run(row.id)
        root = str(PurePosixPath(row.remote_spool).parent.parent)
        deployment = dataclasses.replace(self.deployment, root=root)
        return RemoteRun(row.id, row.remote_spool, deployment)


def place(
    session: Callable[[], BoardSession],
    board: Board,
    asked: Engine,
    models: Callable[[Facts, str | None], Iterable[PreparedModel]],
    store: Store,
    tell: Tell,
    *,
    sources: Path | None = None,
    check: Callable[[], None] | None = None,
    sanitize: str | None = None,
) -> Placed:
    """Probes the board, and sends what it lacks of the engine, its wheels and its models.

    `asked` is what the command line asks of the engine: whether native code is built. `models` says
    which, given the board's facts and why it has no native code (None: it has). `session` gives the
    live connection. `sources` is the folder of another engine than this checkout's; `sanitize`: see
    build_bundle. What was learned of the board goes into the store. `tell` may raise to stop, and
    so may `check`, which is called while something is waited for. Raises BoardError.
    """
    store.record_board(
        board.name,
        host=None if board.virtual is not None else board.host,
        virtual=board.virtual is not None,
        tags=list(board.tags),
        budget=board.budget.model_dump(mode="json"),
    )
    tell("connecting", None)
    connected = session()
    tell("probing", None)
    facts = probe(connected, deadline=Deadline.after(PROBE_S, "probe"))
    store.record_board(
        board.name,
        facts=facts.model_dump(mode="json"),
        boot_id=facts.boot_id,
        serial=facts.serial,
    )
    tell("building the bundle", None)
    bundle = build_bundle(
        facts,
        board.name,
        native=wants_native(board, asked),
        toolchain=board.toolchain,
        sanitize=sanitize,
        sources=sources,
        check=check,
    )
    require_native(board, asked, bundle)

    chosen = list(models(facts, bundle.why_not_native))
    for model in chosen:
        record_model(store, model)
    packages = {model.package: model.name for model in chosen}
    names = {path.name: name for path, name in packages.items()}

    def sending(name: str, done: int, total: int) -> None:
        share = done / total if total else None
        tell(f"sending {names.get(name, name)}: {_size(done)} of {_size(total)}", share)

    deployment = deploy(
        session(),
        facts,
        bundle,
        sorted(packages),
        deadline=Deadline.after(DEPLOY_S, "deploy"),
        on_progress=sending,
    )
    return Placed(facts, bundle.engine_hash, deployment, bundle.why_not_native, bundle.native)


def require_native(board: Board, asked: Engine, bundle: Bundle) -> None:
    """Raises BoardError "deploy" when native code cannot be had and nothing else will do."""
    if bundle.native is None and wants_native(board, asked) and not may_fall_back(board, asked):
        raise BoardError(
            board.name,
            "deploy",
            f"no native code for it: {bundle.why_not_native}",
            expected="a compiler that builds for the board",
            remedy="install the host's requirements again (zig is one of them), name a toolchain "
            "in devices.yaml, or ask for --unit packed",
        )


def record_model(store: Store, model: PreparedModel) -> None:
    """What a package is, beside the results of its runs."""
    store.record_model(
        model.sha256,
        name=model.name,
        scheme=model.scheme,
        source_sha256=model.source_sha256,
        hyperparameters=model.hyperparameters.to_json(),
        notes=list(model.notes),
        bytes=model.package.stat().st_size,
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.0f} kB"
