"""One board's part of a campaign: lease, connect, probe, deploy, stages in order, release."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.deploy.models import in_layout
from harness.errors import BoardError, HarnessError
from harness.farm import canary
from harness.farm.aboard import make_room
from harness.farm.keys import power_mode, quant_hash, toolchain_name
from harness.farm.placing import Placed, place
from harness.farm.repair import Repairs
from harness.farm.results import INTERRUPTED, StageResult
from harness.farm.resume import abandon, continued, orphans
from harness.farm.tuning import Tuning
from harness.jobs import lifecycle
from harness.jobs.base import Stage, StageContext, stage_model, stage_refusal
from harness.jobs.engines import EngineChoice, Tuned, choose_engine, layout_of
from harness.jobs.health import HEALTH
from harness.verdicts import Check, Outcome, Verdict, one_line

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.deploy.models import PreparedModel
    from harness.farm.campaign import Campaign
    from harness.inventory import Board
    from harness.jobs.lifecycle import RemoteRun
    from harness.store import RunRow

CONNECT_S = 90.0  # connection, banner, host key, authentication, with their own retries
CLEAN_S = 60.0

# Trouble of the link that a second try may not meet again. Every try is recorded.
RETRIED = ("board-lost", "board-reset", "timeout")
ATTEMPTS = 2


class Interrupted(Exception):
    """The user asked to stop."""


class BoardRun:
    """Runs in one thread. Publishes a result for every stage, whatever happens."""

    def __init__(self, campaign: Campaign, board: Board) -> None:
        self.campaign, self.board = campaign, board
        self.orders, self.store = campaign.orders, campaign.store
        self.lease_lost = threading.Event()
        self.continued: RunRow | None = None  # what a killed harness began and we go on with
        self._uncleaned: dict[str, tuple[RemoteRun, str]] = {}  # by run: what is left, and why
        self._session: BoardSession | None = None
        self._placed: Placed | None = None
        self.tuning = Tuning(self)
        self.repairs = Repairs(self)

    def execute(self) -> None:
        """Everything between taking and releasing the board."""
        from harness.farm.stage import StageRun

        try:
            if not self.orders.admits:
                self.campaign.care.require_admitted(self.board.name)
            self.say("", "waiting for the board")
            with self.campaign.lease(self):
                try:
                    self._prepare_patiently()
                    for stage in self.orders.stages:
                        result = StageRun(self, stage).result()
                        self.campaign.publish(result)
                        if self.orders.admits and result.outcome.lets_next_stage_run:
                            self.campaign.care.release(self.board.name, "passed a health check")
                        if not result.outcome.lets_next_stage_run:
                            break
                finally:
                    self._leave()
        except Interrupted:
            self._mark_interrupted()
        except HarnessError as error:
            self.trouble(kind_of(error), error_verdict(error))

    # --- results that are no stage's own --------------------------------------------------------

    def trouble(self, kind: str, verdict: Verdict) -> None:
        """An ERROR for the first undecided stage: the board could not be brought that far.

        Infrastructure is never a finding about the product.
        """
        stage = self._first_undecided()
        if stage is not None:
            run_id = self._record_trouble(stage, kind, verdict)
            self.campaign.publish(
                StageResult(self.board.name, stage.name, verdict, run_id, error_kind=kind)
            )

    def _record_trouble(self, stage: Stage, kind: str, verdict: Verdict) -> str:
        run_id = self.begin_run(stage)
        self.store.finish_run(run_id, verdict, error_kind=kind)
        return run_id

    def block_rest(self) -> None:
        """Every stage after one that did not pass is recorded as blocked by it."""
        culprit = ""
        for stage in self.orders.stages:
            result = self.campaign.peek(self.board.name, stage.name)
            if result is None and culprit:
                verdict = Verdict(outcome=Outcome.BLOCKED, headline=f"blocked by {culprit}")
                run_id = self.begin_run(stage)
                self.store.finish_run(run_id, verdict)
                self.campaign.publish(
                    StageResult(self.board.name, stage.name, verdict, run_id, attempts=0)
                )
            elif result is not None and result.error_kind == INTERRUPTED:
                return  # the rest was not asked for any more
            elif result is not None and not result.outcome.lets_next_stage_run:
                culprit = culprit or stage.name

    def _first_undecided(self) -> Stage | None:
        name = self.board.name
        undecided = (s for s in self.orders.stages if self.campaign.peek(name, s.name) is None)
        return next(undecided, None)

    def _mark_interrupted(self) -> None:
        for stage in self.orders.stages:
            if self.campaign.peek(self.board.name, stage.name) is None:
                self.campaign.publish_interrupted(self.board.name, stage.name)

    # --- what stages use ------------------------------------------------------------------------

    def say(self, stage: str, text: str, fraction: float | None = None) -> None:
        self.campaign.reporter.activity(self.board.name, stage, text, fraction)

    def check_stop(self) -> None:
        """Raises Interrupted when the user asked to stop, BoardError when the lease is lost."""
        if self.lease_lost.is_set():
            raise BoardError(
                self.board.name,
                "busy",
                "somebody else took the board over",
                expected="our lease to hold",
                remedy=f"see `harness boards why {self.board.name}`",
            )
        if self.campaign.stop.is_set():
            raise Interrupted

    def stopping(self) -> bool:
        return self.lease_lost.is_set() or self.campaign.stop.is_set()

    def session(self) -> BoardSession:
        """The board's one connection; a new one when the last is gone. Raises BoardError."""
        if self._session is None or not self._session.alive:
            self.close()
            deadline = Deadline.after(CONNECT_S, f"connecting to {self.board.name}")
            self._session = open_session(self.board, deadline=deadline)
        return self._session

    def close(self) -> None:
        """Drops the connection; `session` makes a new one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def placed(self) -> Placed:
        """What was put on the board last; stages run after that."""
        if self._placed is None:
            raise RuntimeError(f"nothing was put on {self.board.name} yet")
        return self._placed

    @property
    def engine(self) -> EngineChoice:
        """How the engine runs on the board as it is now."""
        return self._choose(self.placed.facts, self.placed.why_not_native, self.tuning.found)

    @property
    def untuned(self) -> EngineChoice:
        """The same before the board was measured."""
        return self._choose(self.placed.facts, self.placed.why_not_native)

    def _choose(
        self, facts: Facts, why_not_native: str | None, tuned: Tuned | None = None
    ) -> EngineChoice:
        asked = self.orders.options.engine
        return choose_engine(self.board, facts, asked, why_not_native=why_not_native, tuned=tuned)

    def model_for(self, stage: Stage, engine: EngineChoice | None = None) -> PreparedModel:
        """The stage's model in the layout of the board's unit."""
        model = stage_model(stage, self.orders.model, self.orders.options)
        unit = (engine or self.engine).options.unit
        return in_layout(model, layout_of(unit))

    def context(
        self, stage: Stage, facts: Facts, engine: EngineChoice, run_id: str = "", **more: Any
    ) -> StageContext:
        """What the stage is given; `more` is what is known once the board has everything."""
        return StageContext(
            board=self.board,
            facts=facts,
            model=self.model_for(stage, engine),
            options=self.orders.options,
            run_id=run_id,
            engine=engine,
            **{"remote_package": None, "cache": Path(), **more},
        )

    def _models(self, facts: Facts, why_not_native: str | None) -> list[PreparedModel]:
        """What the stages need on the board, but for models that are too large for it."""
        engine = self._choose(facts, why_not_native)
        found = []
        guarded = any(canary.is_wanted(self, stage) for stage in self.orders.stages)
        for stage in (*self.orders.stages, *([HEALTH] if guarded else [])):
            context = self.context(stage, facts, engine)
            try:
                refused = stage_refusal(stage, context) is not None
            except HarnessError:  # told when the stage's turn comes: the model may fit by then
                refused = False
            if not refused:
                found.append(context.model)
        return found

    def begin_run(self, stage: Stage) -> str:
        """A planned run in the store, with all that is known of the board by now."""
        placed, options = self._placed, self.orders.options
        model = self.orders.model
        if placed is not None:
            model = in_layout(model, layout_of(self.engine.options.unit))
        facts = placed.facts if placed else None
        return self.store.begin_run(
            campaign_id=self.orders.campaign_id,
            board=self.board.name,
            stage=stage.name,
            parameters=options.model_dump(mode="json"),
            model_hash=model.sha256,
            model_name=model.name,
            scheme=model.scheme,
            quant_hash=quant_hash(model),
            engine_hash=placed.engine_hash if placed else None,
            toolchain=toolchain_name(self.board, placed.native if placed else None),
            power_mode=power_mode(facts),
            boot_id=facts.boot_id if facts else None,
            facts=facts.model_dump(mode="json") if facts else None,
        )

    def clean_up(self, remote: RemoteRun) -> None:
        """Ends a run and removes what it left. What resists is tried again before another attempt,
        and before the release."""
        deadline = Deadline.after(CLEAN_S, f"cleaning {self.board.name}")
        try:
            session = self.session()
            left = lifecycle.clean_up(session, remote.deployment, remote, deadline)
        except BoardError as error:
            left = [f"run {remote.run_id} in {remote.spool} ({error.found})"]
        if left:
            self._uncleaned[remote.run_id] = (remote, "; ".join(left))
        else:
            self._uncleaned.pop(remote.run_id, None)

    def clean_again(self) -> None:
        """Tries to remove what resisted before."""
        for remote, _ in list(self._uncleaned.values()):
            self.clean_up(remote)

    def make_room(self, keep: RunRow | None = None) -> None:
        """Before a measurement: nothing but run `keep` is alive on the board. Raises BoardError."""
        make_room(
            self.session(),
            self.placed,
            self.store,
            self.clean_up,
            campaign_id=self.orders.campaign_id,
            keep=keep.id if keep is not None else None,
        )

    def _leave(self) -> None:
        """Before the board is released: it is clean, or the user is told what is on it."""
        self.clean_again()
        if self._uncleaned:
            with contextlib.suppress(Interrupted, BoardError):  # stopped: it is told below
                if self.repairs.of_what_stays("; ".join(self._left())):
                    self.clean_again()  # its processes are gone; its files are not
        for left in self._left():
            self.campaign.leave_behind(f"{self.board.name}: {left}")
        self.close()

    def _left(self) -> list[str]:
        return [left for _, left in self._uncleaned.values()]

    # --- before the stages ----------------------------------------------------------------------

    def _prepare_patiently(self) -> None:
        """Tries again when the link broke, or when a dead board was brought back; what was sent by
        then is not sent again."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._prepare()
                return
            except BoardError as error:
                stage = self._first_undecided()
                if stage is None or self.stopping():
                    raise
                last = attempt == ATTEMPTS
                if (last or error.kind not in RETRIED) and not self.repairs.after(error):
                    raise
                verdict = error_verdict(error)
                self._record_trouble(stage, error.kind, verdict)
                self.campaign.reporter.note(f"{self.board.name}: {verdict.headline}; trying again")
        self._prepare()

    def place_again(self) -> None:
        """Before another attempt: a dead board is brought back, where that is possible; folders,
        clocks and cores are looked at anew, and what the failed attempt left is ended."""
        try:
            self.place()
        except BoardError as error:
            if not self.repairs.after(error):
                raise
            self.place()
        self.clean_again()

    def _prepare(self) -> None:
        self.place()
        if self.orders.resumed:
            self.continued = continued(
                self.store,
                self.orders.campaign_id,
                self.board.name,
                [stage.name for stage in self.orders.stages],
                self.placed.engine_hash,
            )
        self._clear_orphans()

    def place(self) -> None:
        """Engine and models on the board as it is now: it may have been reset. Raises BoardError,
        Interrupted."""

        def tell(text: str, share: float | None) -> None:
            self.check_stop()
            self.say("", text, share)

        self._placed = place(
            self.session,
            self.board,
            self.orders.options.engine,
            self._models,
            self.store,
            tell,
            check=self.check_stop,
        )
        self.tuning.look_up()

    def _clear_orphans(self) -> None:
        """Ends what a killed harness left running here and nobody will collect."""
        keep = self.continued.id if self.continued is not None else None
        for row in orphans(self.store, self.board.name, self.orders.campaign_id, keep=keep):
            # It may have run for hours: whoever ends it says so, and not in a passing line.
            self.campaign.reporter.note(
                f"{self.board.name}: ending {row.stage} run {row.id[:8]}, which a harness that is "
                "gone left here"
            )
            self.clean_up(self.placed.run_of(row))
            mine = row.campaign_id == self.orders.campaign_id
            if mine and row.engine_hash not in (None, self.placed.engine_hash):
                abandon(self.store, row.id, "the engine was changed before it was resumed")
            else:
                abandon(self.store, row.id)


def kind_of(error: HarnessError) -> str:
    """The stable name of a trouble: a BoardError's own, or that it is the host's."""
    return error.kind if isinstance(error, BoardError) else "host"


def error_verdict(error: HarnessError) -> Verdict:
    """Trouble as a verdict. Its headline is one line; its check holds the message as a whole."""
    found = error.found + (f"; expected {error.expected}" if error.expected else "")
    check = Check(
        name=kind_of(error),
        outcome=Outcome.ERROR,
        measured=error.found,
        limit=error.expected or None,
        sentence=found,
    )
    return Verdict(
        outcome=Outcome.ERROR,
        headline=one_line(found),
        checks=(check,),
        remedy=error.remedy or None,
    )
