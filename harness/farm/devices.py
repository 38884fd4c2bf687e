"""Boards under pytest: campaigns that run behind the tests, and boards for tests of one's own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.boards.care import Care
from harness.boards.leases import Leases, lease_guard
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.farm.board import RETRIED
from harness.farm.campaign import LEASE_TTL_S, Campaign
from harness.farm.deployed import Deployed, facts_properties
from harness.farm.progress import Silent
from harness.farm.runner import Resume, open_campaign, stop_virtual_boards
from harness.farm.selection import bringup_options, choose_stages
from harness.jobs.engines import likely_layout
from harness.store import Store
from harness.verdicts import Verdict

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.farm.results import StageResult
    from harness.inventory import Board

CLOSE_S = 180.0  # for boards to be cleaned and released when a session ends early

log = logging.getLogger("harness.farm")


class Logged(Silent):
    """Tells a campaign's course to the log; see it with --log-cli-level=INFO."""

    def activity(self, board: str, stage: str, text: str, fraction: float | None = None) -> None:
        share = "" if fraction is None else f" {fraction:.0%}"
        log.info("%s %s%s %s", board, stage, share, text)

    def finished(self, board: str, stage: str, verdict: Verdict, *, reused: bool) -> None:
        del reused
        log.info("%s %s %s: %s", board, stage, verdict.outcome.value.upper(), verdict.headline)

    def note(self, text: str) -> None:
        log.warning("%s", text)


class DeviceSession:
    """One pytest session's boards. Stages run on all of them side by side, as soon as the first
    result is asked for; tests wait for theirs."""

    def __init__(
        self,
        boards: Sequence[Board],
        cases: Sequence[tuple[str, str]],
        *,
        model: Path | None,
        stress_minutes: float | None,
        all_at_once: bool,
        sources: Path | None = None,
    ) -> None:
        """`sources` is the folder of another engine than this checkout's, for tests of one's
        own."""
        self._sources = sources
        self.boards = {board.name: board for board in boards}
        self.store = Store.open()
        self._options = bringup_options(stress_minutes=stress_minutes)
        self._cases, self._path, self._all_at_once = cases, model, all_at_once
        self._stop = threading.Event()
        self._model: PreparedModel | None = None
        self._campaigns: dict[str, Campaign] = {}  # by board
        self._troubles: dict[str, list[str]] = {}  # by board
        self._deployed: dict[str, Deployed] = {}  # by board

    @property
    def model(self) -> PreparedModel:
        """Fetched and packed when a test first needs it."""
        from harness.deploy.models import demo_model, prepare_model

        if self._model is None:
            layout = likely_layout(self.boards.values(), self._options.engine)
            self._model = prepare_model(self._path or demo_model(), layout=layout)
        return self._model

    def result(self, board: str, stage: str) -> StageResult:
        """Waits for the stage's result; starts its board, and with `all_at_once` all others."""
        if board not in self._campaigns:
            self._open([board] if not self._all_at_once else list(self.boards))
        campaign = self._campaigns[board]
        if self._all_at_once:
            for other in self._distinct():
                other.start()
        else:
            campaign.start()
        return campaign.result(board, stage)

    def _open(self, names: Sequence[str]) -> None:
        """Campaigns of the boards of those names that have the same stages to run."""
        stages: dict[str, list[str]] = {}
        for board, stage in self._cases:
            if board in names:
                stages.setdefault(board, []).append(stage)
        alike: dict[tuple[str, ...], list[str]] = {}
        for board, names in stages.items():
            alike.setdefault(tuple(sorted(set(names))), []).append(board)
        for same, boards in alike.items():
            campaign = open_campaign(
                [self.boards[board] for board in boards],
                self.model,
                self._options,
                self.store,
                Logged(),
                stop=self._stop,
                stages=choose_stages(same),
                # A test that passes has run: what a killed session left is cleared, not continued.
                resume=Resume.NEVER,
                kind="pytest",
            )
            self._campaigns.update(dict.fromkeys(boards, campaign))

    def _distinct(self) -> list[Campaign]:
        return list({id(campaign): campaign for campaign in self._campaigns.values()}.values())

    def properties(self, result: StageResult) -> dict[str, Any]:
        """What a test report says beside the result: the board's facts, the run, its numbers."""
        row = self.store.run(result.run_id) if result.run_id else None
        found = {
            "board": result.board,
            "stage": result.stage,
            "outcome": result.outcome.value,
            "model": self.model.name,
            "scheme": self.model.scheme,
            "run_id": result.run_id,
            **facts_properties((row.facts if row is not None else None) or {}),
            "engine": row.engine_hash if row is not None else None,
        }
        if result.attempts > 1:
            found["attempts"] = result.attempts
        found.update({f"check.{check.name}": check.measured for check in result.verdict.checks})
        return {name: value for name, value in found.items() if value is not None}

    @contextlib.contextmanager
    def deployed(self, board: Board, retries: int = 0) -> Iterator[Deployed]:
        """The board for tests of one's own, once the stages on it, if any, have ended. Trouble of
        the link while it is prepared is tried again up to `retries` times."""
        campaign = self._campaigns.get(board.name)
        if campaign is not None:
            campaign.wait()
        Care(self.store).require_admitted(board.name)
        with lease_guard(Leases(self.store), board.name, "tests on the board", ttl_s=LEASE_TTL_S):
            found = self._prepared(board, retries)
            self._deployed[board.name] = found
            try:
                yield found
            finally:
                del self._deployed[board.name]
                found.close()

    def _prepared(self, board: Board, retries: int) -> Deployed:
        """Tries again when the link broke; each try is told to `drain`."""
        for _ in range(retries):
            try:
                return self._deploy(board)
            except BoardError as error:
                if error.kind not in RETRIED:
                    raise
                self._troubles.setdefault(board.name, []).append(f"{error.kind}: {error}")
                log.warning("%s; trying again", error)
        return self._deploy(board)

    def _deploy(self, board: Board) -> Deployed:
        return Deployed(board, self.model, self._options.engine, self.store, sources=self._sources)

    def drain(self, board: str) -> list[str]:
        """What went wrong, once each, before the board was there for tests of one's own."""
        return self._troubles.pop(board, [])

    def renew(self, board: str) -> None:
        """Everything in place again on a board that a test has, if one has. Raises BoardError."""
        found = self._deployed.get(board)
        if found is not None:
            found.renew()

    def close(self) -> None:
        """Ends what still runs, cleans and releases the boards, and records the campaigns."""
        self._stop.set()
        deadline = Deadline.after(CLOSE_S, "cleaning the boards")
        for campaign in self._distinct():
            if not campaign.wait(deadline):
                log.error("boards did not end within %s s; their leases will expire", CLOSE_S)
            campaign.finish()
        stop_virtual_boards(self.store, self.boards.values())
        self.store.close()
