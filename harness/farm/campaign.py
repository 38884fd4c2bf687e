"""A campaign: the same stages on several boards, side by side, each board for itself."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.boards.care import Care
from harness.boards.leases import Leases, lease_guard
from harness.deadline import Deadline
from harness.errors import HarnessError
from harness.farm.descriptors import make_room
from harness.farm.progress import Reporter
from harness.farm.results import INTERRUPTED, CampaignResult, StageResult, stopped_verdict
from harness.farm.resume import mark_stopped
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from harness.boards.leases import Lease
    from harness.deploy.models import PreparedModel
    from harness.farm.board import BoardRun
    from harness.inventory import Board
    from harness.jobs.base import BringupOptions, Stage
    from harness.store import Store

LEASE_TTL_S = 90.0  # a lease outlives its holder by this much at most


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a campaign does: the same on each of its boards."""

    campaign_id: str
    model: PreparedModel
    options: BringupOptions
    stages: tuple[Stage, ...]
    resumed: bool  # continue what a killed harness left, instead of clearing it away
    admits: bool = False  # a health check: boards in quarantine take part, and leave it by passing


class Campaign:
    """Runs stages on boards, one thread and one connection per board.

    Results can be waited for one by one. `stop` ends everything early: runs on boards are
    cancelled, boards cleaned and released. A board's trouble ends that board's part only.
    """

    def __init__(
        self,
        boards: Sequence[Board],
        orders: Orders,
        store: Store,
        reporter: Reporter,
        stop: threading.Event,
    ) -> None:
        self.boards = {board.name: board for board in boards}
        self.orders, self.store, self.reporter, self.stop = orders, store, reporter, stop
        self.left_behind: list[str] = []
        self.care = Care(store)
        self._leases = Leases(store)
        self._lock = threading.Lock()
        self._results: dict[tuple[str, str], concurrent.futures.Future[StageResult]] = {
            (board.name, stage.name): concurrent.futures.Future()
            for board in boards
            for stage in orders.stages
        }
        self._threads: dict[str, threading.Thread] = {}

    # --- the boards ---------------------------------------------------------------------------

    def start(self, names: Sequence[str] | None = None) -> None:
        """Starts the named boards, or all, in random order; one that runs already is left alone.

        Random, so that a board which wedges does not cost every campaign its time at the start.
        """
        chosen = list(self.boards if names is None else names)
        random.shuffle(chosen)
        make_room(len(chosen))
        with self._lock:
            for name in chosen:
                if name not in self._threads:
                    # A daemon: a board that hangs past every deadline must not keep the process.
                    thread = threading.Thread(
                        target=self._run_board, args=(name,), name=f"board {name}", daemon=True
                    )
                    self._threads[name] = thread
                    thread.start()

    def _run_board(self, name: str) -> None:
        from harness.farm.board import BoardRun  # paramiko and the rest, on first use

        run = BoardRun(self, self.boards[name])
        try:
            try:
                run.execute()
            except Exception:
                # A defect of ours ends this board's part, not the others'.
                self.reporter.note(f"{name}: internal error\n{traceback.format_exc()}")
                run.trouble("internal", _error("internal error of the harness: see above"))
            run.block_rest()
        except Exception as error:
            # Not even the store could be told. Whoever waits for a result must get one.
            self.reporter.note(f"{name}: the result was not stored\n{traceback.format_exc()}")
            for stage in self.orders.stages:
                verdict = _error(f"the result could not be stored: {error}")
                self.publish(StageResult(name, stage.name, verdict, None, error_kind="internal"))

    def lease(self, run: BoardRun) -> AbstractContextManager[Lease]:
        """Holds the board. `run.lease_lost` is set when somebody else took it over meanwhile."""

        def lost(error: HarnessError) -> None:
            self.reporter.note(str(error))
            run.lease_lost.set()

        reason = f"bring-up of {self.orders.model.name}"
        return lease_guard(self._leases, run.board.name, reason, ttl_s=LEASE_TTL_S, on_lost=lost)

    # --- the results --------------------------------------------------------------------------

    def publish(self, result: StageResult) -> None:
        """A stage's final result; the first one counts."""
        future = self._results[result.board, result.stage]
        with self._lock:
            if future.done():
                return
            future.set_result(result)
        self.reporter.finished(result.board, result.stage, result.verdict, reused=result.reused)

    def publish_interrupted(self, board: str, stage: str) -> None:
        """A stage that was not begun, or not ended, when the user asked to stop."""
        self.publish(
            StageResult(board, stage, stopped_verdict(), None, attempts=0, error_kind=INTERRUPTED)
        )

    def peek(self, board: str, stage: str) -> StageResult | None:
        """The stage's result, or None while there is none."""
        future = self._results[board, stage]
        return future.result() if future.done() else None

    def leave_behind(self, sentence: str) -> None:
        """Something of ours could not be removed from a board."""
        with self._lock:
            self.left_behind.append(sentence)
        self.reporter.note(f"left behind on {sentence}")

    def result(self, board: str, stage: str) -> StageResult:
        """Waits for a stage of a board that was started. Bounded by that board's own deadlines."""
        future = self._results[board, stage]
        while True:
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                if not self._threads[board].is_alive() and not future.done():
                    raise RuntimeError(f"board {board} ended without a result of {stage}") from None

    def wait(self, deadline: Deadline | None = None) -> bool:
        """Waits for every started board; False if `deadline` passes first."""
        for thread in list(self._threads.values()):
            while thread.is_alive():
                if deadline is not None and deadline.expired:
                    return False
                thread.join(0.2)  # in steps: a signal handler runs in between
        return True

    def finish(self) -> CampaignResult:
        """After `wait`: closes the campaign in the store, or records there that it was stopped."""
        results: dict[str, dict[str, StageResult]] = {}
        for board, stage in self._results:
            if self.peek(board, stage) is None:
                self.publish_interrupted(board, stage)
            result = self.peek(board, stage)
            if result is not None:
                results.setdefault(board, {})[stage] = result
        interrupted = any(
            item.error_kind == INTERRUPTED for row in results.values() for item in row.values()
        )
        outcome = CampaignResult(
            self.orders.campaign_id, results, interrupted, tuple(self.left_behind)
        )
        if interrupted:
            mark_stopped(self.store, self.orders.campaign_id)
        else:
            self.store.finish_campaign(self.orders.campaign_id, outcome.outcome)
        return outcome


def _error(headline: str) -> Verdict:
    return Verdict(outcome=Outcome.ERROR, headline=headline[:118])
