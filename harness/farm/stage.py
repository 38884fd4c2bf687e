"""One stage on one board: plan, start or find again, follow, clean up, judge, record."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.boards.console import capturing, last_lines
from harness.deadline import Deadline
from harness.errors import BoardError, HarnessError
from harness.farm import canary
from harness.farm.board import (
    ATTEMPTS,
    RETRIED,
    Interrupted,
    error_verdict,
    kind_of,
)
from harness.farm.faults import environment_for
from harness.farm.results import INTERRUPTED, StageResult, stopped_verdict
from harness.farm.resume import collected_log, judged
from harness.jobs import lifecycle
from harness.jobs.base import stage_refusal
from harness.jobs.health import HEALTH
from harness.jobs.ladder import LADDER, tuned_of
from harness.triage.reading import reset_of
from harness.verdicts import Check, Outcome, Verdict, one_line

if TYPE_CHECKING:
    from engine.records import Event
    from harness.farm.board import BoardRun
    from harness.farm.placing import Placed
    from harness.jobs.base import Plan, Stage, StageContext
    from harness.jobs.lifecycle import RemoteRun
    from harness.jobs.runlog import RunLog
    from harness.store import RunRow

START_S = 180.0  # sending the run's inputs included
COLLECT_S = 600.0  # on top of the run's own deadline: reconnecting, and pulling what it left


class StageRun:
    def __init__(self, run: BoardRun, stage: Stage) -> None:
        self.run, self.stage = run, stage
        self.board, self.store, self.orders = run.board, run.store, run.orders
        self._boot_id: str | None = None  # of the boot that the run ran in
        self._rate = ""  # tokens/s, once the run has told a time per token

    @property
    def placed(self) -> Placed:
        return self.run.placed

    def result(self) -> StageResult:
        """Reuses, continues or runs the stage; trouble is tried once more, a FAIL never.

        Raises Interrupted.
        """
        campaign, name = self.orders.campaign_id, self.board.name
        earlier: RunRow | None = None
        if self.orders.resumed:
            done = judged(self.store, campaign, name, self.stage.name, self.placed.engine_hash)
            if done is not None:
                return done
            if self.run.continued is not None and self.run.continued.stage == self.stage.name:
                earlier = self.run.continued
        if self.stage.timed and earlier is None:
            self.run.tuning.ensure()
        guarded = canary.is_wanted(self.run, self.stage)
        if guarded and earlier is None:
            refused = canary.before(self.run, self.stage)
            if refused is not None:
                return refused
        result = self.anew(earlier)
        return canary.after(self.run, self.stage, result) if guarded else result

    def anew(self, earlier: RunRow | None = None) -> StageResult:
        """As `result`, without what was judged before."""
        result = self.attempt(1, earlier)
        for attempt in range(2, ATTEMPTS + 1):
            if result.error_kind not in RETRIED or self.run.stopping():
                break
            self.run.campaign.reporter.note(
                f"{self.board.name} {self.stage.name}: {result.verdict.headline}; trying again"
            )
            try:
                self.run.place_again()
            except HarnessError as error:
                kind, verdict = kind_of(error), error_verdict(error)
                if (result.error_kind, kind) == ("board-lost", "unreachable"):
                    # One ending, not two: its name says in which stage the board was lost.
                    kind = "board-lost"
                    headline = one_line(f"lost, and not reached again: {error}")
                    verdict = verdict.model_copy(update={"headline": headline})
                run_id = self.run.begin_run(self.stage)
                self._record(run_id, verdict, kind)
                result = StageResult(
                    self.board.name, self.stage.name, verdict, run_id, attempt, error_kind=kind
                )
                break
            result = self.attempt(attempt, None)
        if self.stage.name == HEALTH.name:
            canary.record(self.run, result)
        if self.stage.name == LADDER.name:
            self.run.tuning.keep(result.run_id, tuned_of(result.verdict))
        return result

    # --- one attempt ----------------------------------------------------------------------------

    def attempt(self, attempt: int = 1, earlier: RunRow | None = None) -> StageResult:
        """One run, recorded whatever happens; trouble of board or host becomes its ERROR."""
        run_id = earlier.id if earlier is not None else self.run.begin_run(self.stage)
        kind: str | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="harness-run-") as folder:
                context = self._context(run_id, Path(folder))
                refused = None if earlier is not None else stage_refusal(self.stage, context)
                verdict = refused or self._judged(context, earlier)
        except Interrupted:
            self._record(run_id, stopped_verdict(), INTERRUPTED)
            raise
        except HarnessError as error:
            kind, verdict = kind_of(error), self._with_console(error_verdict(error), run_id)
            if kind == "board-reset":
                crash = reset_of(self.store, run_id, error.found)
                verdict = verdict.model_copy(update={"crash": crash})
        except Exception as error:
            # A defect of ours: told in full, kept apart from findings about the product.
            self.run.campaign.reporter.note(traceback.format_exc())
            kind, verdict = "internal", _defect(error)
        self._record(run_id, verdict, kind)
        return StageResult(
            self.board.name, self.stage.name, verdict, run_id, attempts=attempt, error_kind=kind
        )

    def _judged(self, context: StageContext, earlier: RunRow | None) -> Verdict:
        log = self._log(context, earlier)
        self.run.say(self.stage.name, "judging")
        return self.stage.judge(context, log)

    def _log(self, context: StageContext, earlier: RunRow | None) -> RunLog:
        """What the run told, from its start or from where a killed harness left it to its end.

        The board is clean afterwards, whatever happened, as far as it can be reached.
        """
        begun = earlier is not None
        remote = self.placed.run(context.run_id)
        if earlier is not None:
            remote = self.placed.run_of(earlier)
        try:
            self.run.check_stop()
            self.run.say(self.stage.name, "preparing references on the host")
            plan = self.stage.plan(context)
            self.run.check_stop()
            if earlier is not None:
                collected = collected_log(self.store, earlier, self.placed.engine_hash)
                if collected is not None:
                    return collected
                self._require_there(remote)
            self.run.make_room(keep=earlier)
            with capturing(self.board, self.store.raw_folder(context.run_id)):
                if earlier is None:
                    begun = True
                    self._start(context, plan)
                log = self._follow(context, plan, remote)
            self.run.check_stop()
            self.store.collected(context.run_id)
            return log
        finally:
            if begun:
                self.run.clean_up(remote)

    def _context(self, run_id: str, folder: Path) -> StageContext:
        # A ladder starts from what is asked, not from what an earlier one found.
        engine = self.run.untuned if self.stage.name == LADDER.name else self.run.engine
        model = self.run.model_for(self.stage, engine)
        return self.run.context(
            self.stage,
            self.placed.facts,
            engine,
            run_id,
            # None: too large for the board, and not sent
            remote_package=self.placed.deployment.paths.get(model.sha256),
            cache=folder,
        )

    def _require_there(self, remote: RemoteRun) -> None:
        """The board has the run that a killed harness started, going on or ended.

        Raises BoardError "board-lost" otherwise: under the same id a second run would be added to
        what the host has of the first.
        """
        self.run.say(self.stage.name, "looking for the run of the interrupted bring-up")
        if lifecycle.find(self.run.session(), remote.deployment, remote.run_id) is None:
            raise BoardError(
                self.board.name,
                "board-lost",
                "the run of the interrupted bring-up was no longer on the board",
                expected=f"its spool {remote.spool}",
                remedy="it is run anew",
            )
        self.run.campaign.reporter.note(
            f"{self.board.name} {self.stage.name}: found the run of the interrupted bring-up, "
            "and continue it"
        )

    def _start(self, context: StageContext, plan: Plan) -> None:
        self.run.say(self.stage.name, "starting")
        remote = lifecycle.start(
            self.run.session(),
            self.placed.deployment,
            plan.spec,
            plan.inputs,
            environment=environment_for(self.board.environment, context.model),
            deadline=Deadline.after(START_S, f"starting {self.stage.name}"),
        )
        self.store.running(context.run_id, remote.spool, _plain(self.placed.deployment))

    def _follow(self, context: StageContext, plan: Plan, remote: RemoteRun) -> RunLog:
        seconds = plan.spec.deadline_s + COLLECT_S
        return lifecycle.follow(
            self.run.session,
            remote,
            self.store.raw_folder(context.run_id),
            on_event=self._event,
            deadline=Deadline.after(seconds, f"{self.stage.name} on {self.board.name}"),
            cancel=self.run.stopping,
        )

    def _event(self, event: Event) -> None:
        """Shows what the run tells as it goes."""
        data = event.data
        if event.kind == "run-start":
            self._boot_id = str(data.get("boot_id") or "") or None
        elif event.kind == "data":
            value = data.get("value")
            tpot_s = value.get("tpot_s") if isinstance(value, dict) else None
            if isinstance(tpot_s, (int, float)) and tpot_s > 0:
                self._rate = f", {1 / tpot_s:.1f} tokens/s"
        elif event.kind == "progress":
            done, total = data.get("done"), data.get("total")
            share = None
            if isinstance(done, (int, float)) and isinstance(total, (int, float)) and total > 0:
                share = min(1.0, done / total)
            text = str(data.get("message") or "running") + self._rate
            self.run.say(self.stage.name, text, share)

    def _with_console(self, verdict: Verdict, run_id: str) -> Verdict:
        """The verdict with the console's last words: a board that was lost has told them nowhere
        else."""
        lines = last_lines(self.store.raw_folder(run_id)) if self.board.console else []
        if not lines:
            return verdict
        check = Check(
            name="console",
            outcome=verdict.outcome,
            measured=None,
            limit=None,
            sentence="The console's last lines: " + one_line(" | ".join(lines), 1500),
        )
        return verdict.model_copy(update={"checks": (*verdict.checks, check)})

    def _record(self, run_id: str, verdict: Verdict, kind: str | None) -> None:
        self.store.finish_run(run_id, verdict, error_kind=kind, boot_id=self._boot_id)


def _defect(error: Exception) -> Verdict:
    what = f"internal error of the harness: {type(error).__name__}: {error}"
    return Verdict(
        outcome=Outcome.ERROR, headline=one_line(what), remedy="report it with the traceback above"
    )


def _plain(deployment: Any) -> dict[str, Any]:
    """What the store keeps of a deployment."""
    return {
        "root": deployment.root,
        "python": list(deployment.python),
        "sent_bytes": deployment.sent_bytes,
        "sent_parts": list(deployment.sent_parts),
        "kept_parts": list(deployment.kept_parts),
    }
