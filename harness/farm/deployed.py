"""A board for a test of one's own: leased, connected, with engine and model on it."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.boards.care import Care
from harness.boards.leases import Leases, lease_guard
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.deploy.models import in_layout
from harness.errors import BoardError
from harness.farm.aboard import make_room, runs_of_tests
from harness.farm.board import CLEAN_S, CONNECT_S
from harness.farm.campaign import LEASE_TTL_S
from harness.farm.placing import Placed, place
from harness.farm.resume import abandon, orphans
from harness.jobs import lifecycle
from harness.jobs.engines import EngineChoice, choose_engine, layout_of

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.deploy.models import PreparedModel
    from harness.deploy.push import Deployment
    from harness.inventory import Board, Engine
    from harness.jobs.lifecycle import RemoteRun
    from harness.store import Store

log = logging.getLogger("harness.farm")

BOOT_ID = "/proc/sys/kernel/random/boot_id"
ASK_S = 30.0


class Deployed:
    """What the fixture `deployed` gives. The caller holds the board's lease.

    `session` is a live connection, a new one after the link was lost. When the board was restarted
    meanwhile, it raises BoardError "board-reset" once: what the test had there is gone. Then
    everything is put in place anew.
    """

    def __init__(
        self,
        board: Board,
        packed: PreparedModel,
        asked: Engine,
        store: Store,
        *,
        sanitize: str | None = None,
        sources: Path | None = None,
        layouts: Sequence[str] = (),
        others: Sequence[PreparedModel] = (),
    ) -> None:
        """`packed` is the model in any layout; `asked` what is asked of the engine for all boards;
        `layouts` are those in which the model is put there too, beside the engine's own.
        `sanitize` ("address", "thread", "undefined") deploys a build that finds such faults.
        `others` are models that are put there as well, in the same layouts.
        `sources` is the folder of another engine than this checkout's; after a change of it,
        `renew` puts that one in place.

        Connects, probes and deploys. Raises BoardError.
        """
        self.board, self.model = board, packed
        self.sources = sources
        self._packed, self._asked, self.store = packed, asked, store
        self._sanitize = sanitize
        self._layouts, self._others = layouts, others
        self._session: BoardSession | None = None
        self._placed: Placed | None = None
        self.stale = False  # True: the board was reset, and what was put there may be gone
        try:
            self.renew()
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> Facts:
        """What the board said of itself when it was prepared last."""
        return self._there.facts

    @property
    def deployment(self) -> Deployment:
        return self._there.deployment

    @property
    def package(self) -> str:
        """The model's package, a path on the board."""
        return self.deployment.paths[self.model.sha256]

    def in_layout(self, layout: str) -> PreparedModel:
        """The model in another layout; it is on the board if it was asked for."""
        return in_layout(self._packed, layout)

    @property
    def engine(self) -> EngineChoice:
        """How the engine runs on this board unless a test says otherwise."""
        return self.engine_asked(self._asked)

    def engine_asked(self, asked: Engine) -> EngineChoice:
        """How it runs when this is asked of it; whether there is native code was decided before."""
        return choose_engine(
            self.board, self.facts, asked, why_not_native=self._there.why_not_native
        )

    @property
    def engine_hash(self) -> str:
        """Of the engine's sources that are on the board."""
        return self._there.engine_hash

    @property
    def python(self) -> list[str]:
        """The start of a command that runs the board's Python with the engine importable."""
        return ["env", *(f"{k}={v}" for k, v in self.environment.items()), *self.deployment.python]

    @property
    def environment(self) -> Mapping[str, str]:
        """What the engine finds in its environment: the board's entry, and where its parts lie."""
        return {**self.board.environment, **self.deployment.environment}

    @property
    def session(self) -> BoardSession:
        """The live connection. Raises BoardError."""
        if self.stale:
            self.renew()
        if self._session is not None and self._session.alive:
            return self._session
        session = self.connect()
        before = self.facts.boot_id
        asked = session.run(["cat", BOOT_ID], deadline=Deadline.after(ASK_S, "asking for boot_id"))
        now = asked.stdout.decode(errors="replace").strip()
        if before and asked.status == 0 and now != before:
            self.stale = True
            raise BoardError(
                self.board.name,
                "board-reset",
                f"boot_id is {now}, it was {before}",
                expected="a board that is not restarted under a test",
                remedy="the test is run again where --device-retries allows",
            )
        return session

    def renew(self) -> None:
        """Everything in place on the board as it is now, and nothing of ours alive on it."""
        self._placed = None

        def chosen(facts: Facts, why_not_native: str | None) -> Sequence[PreparedModel]:
            engine = choose_engine(self.board, facts, self._asked, why_not_native=why_not_native)
            self.model = in_layout(self._packed, layout_of(engine.options.unit))
            wanted = dict.fromkeys((layout_of(engine.options.unit), *self._layouts))
            return [
                in_layout(model, layout)
                for model in (self._packed, *self._others)
                for layout in wanted
            ]

        def tell(text: str, share: float | None) -> None:
            done = "" if share is None else f" {share:.0%}"
            log.info("%s%s %s", self.board.name, done, text)

        placed = place(
            self.connect,
            self.board,
            self._asked,
            chosen,
            self.store,
            tell,
            sanitize=self._sanitize,
            sources=self.sources,
        )
        for row in orphans(self.store, self.board.name):
            self._clean(placed.run_of(row))
            abandon(self.store, row.id)
        make_room(self.connect(), placed, self.store, self._clean)
        self._sweep(placed)
        self._placed, self.stale = placed, False

    def properties(self) -> dict[str, Any]:
        """What a test report says of the board."""
        facts = facts_properties(self.facts.model_dump(mode="json"))
        more = {"board": self.board.name, "model": self.model.name, "scheme": self.model.scheme}
        return {**more, **facts, "engine": self.engine_hash}

    def close(self) -> None:
        """Ends the connection; the lease is the caller's."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(BoardError):
                session.close()

    @property
    def _there(self) -> Placed:
        if self._placed is None:
            self.renew()
        if self._placed is None:  # renew sets it or raises
            raise RuntimeError(f"nothing was put on {self.board.name}")
        return self._placed

    def connect(self) -> BoardSession:
        """The live connection, whatever happened to the board meanwhile. Raises BoardError."""
        if self._session is None or not self._session.alive:
            self.close()
            deadline = Deadline.after(CONNECT_S, f"connecting to {self.board.name}")
            self._session = open_session(self.board, deadline=deadline)
        return self._session

    def _sweep(self, placed: Placed) -> None:
        """Removes what runs of tests left that were killed. Nothing of them is alive any more."""
        spools = f"{shlex.quote(placed.deployment.root)}/runs/{runs_of_tests(self.store)}*"
        limit = Deadline.after(CLEAN_S, f"cleaning {self.board.name}")
        self.connect().run(f"rm -rf {spools}", deadline=limit, check=True)

    def _clean(self, remote: RemoteRun) -> None:
        limit = Deadline.after(CLEAN_S, f"cleaning {self.board.name}")
        lifecycle.clean_up(self.connect(), remote.deployment, remote, limit)


@contextlib.contextmanager
def on_board(
    board: Board,
    model: PreparedModel,
    asked: Engine,
    store: Store,
    reason: str,
    **deploying: Any,
) -> Iterator[Deployed]:
    """The board with its lease held for `reason`, engine and model on it; `deploying` goes to
    `Deployed`. Raises BoardError, as for one that was set aside."""
    Care(store).require_admitted(board.name)
    with lease_guard(Leases(store), board.name, reason, ttl_s=LEASE_TTL_S):
        there = Deployed(board, model, asked, store, **deploying)
        try:
            yield there
        finally:
            there.close()


def facts_properties(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a test report says of a board, from its facts as plain JSON; what it told alone."""
    python = facts.get("python") or {}
    found = {
        "machine": facts.get("machine"),
        "cpus": len(facts["cpus"]) if facts.get("cpus") else None,
        "memory_mb": facts.get("memory_mb"),
        "os": facts.get("os"),
        "kernel": facts.get("kernel"),
        "libc": facts.get("libc"),
        "python": python.get("version"),
        "boot_id": facts.get("boot_id"),
        "governor": facts.get("governor"),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}
