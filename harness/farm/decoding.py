"""Decoding on a board from a test of one's own: what the fixture `decode_session` gives."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.deadline import Deadline
from harness.errors import BoardError
from harness.farm.aboard import runs_of_tests
from harness.farm.board import CLEAN_S
from harness.farm.faults import environment_for
from harness.farm.stage import COLLECT_S, START_S
from harness.jobs import failures, lifecycle, prompts
from harness.jobs.base import BringupOptions, Plan, StageContext, make_spec
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.farm.deployed import Deployed
    from harness.jobs.engines import EngineChoice
    from harness.jobs.runlog import RunLog
    from harness.verdicts import Verdict

CONTEXT = 512  # positions of a generation for which none are asked


class DecodeFailed(AssertionError):
    """The engine did not do what it was asked: it crashed, hung, or computed bad numbers."""

    verdict: Verdict | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one prompt led to. `finish` is "length" (`max_new`, or the context was full) or "stop".

    Times are seconds on the board's own clock, after the prompt was given.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first: (end to end - TTFT) / (N - 1)."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


class DecodeSession:
    """Each call is a run of its own on the board: supervised, followed over lost links, cleaned up.

    A prompt is text, or token ids; a model without a tokenizer takes ids alone.
    """

    def __init__(self, deployed: Deployed, folder: Path) -> None:
        """`folder` of this host takes what the board's runs tell."""
        self.deployed, self._folder = deployed, folder

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a model without a tokenizer."""
        found = prompts.tokenizer(self.deployed.model)
        if found is None:
            name = self.deployed.model.name
            raise ValueError(f"{name} has no tokenizer: give token ids in place of {text[:20]!r}")
        return [int(token) for token in found.encode(text)]

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new: int = 32,
        sampling: Mapping[str, Any] | None = None,
        stop: bool = False,
        **more: Any,
    ) -> Turn:
        """The answer to one prompt, greedily unless `sampling` has fields of
        engine.sampling.Sampling; with `stop` it ends where the model ends it. `more` goes to `run`.

        Raises DecodeFailed when the engine fails, BoardError when the board does.
        """
        return self.chat([prompt], max_new=max_new, sampling=sampling, stop=stop, **more)[0]

    def chat(
        self,
        turns: Sequence[str | Sequence[int]],
        *,
        max_new: int = 32,
        sampling: Mapping[str, Any] | None = None,
        stop: bool = False,
        context: int = CONTEXT,
        **more: Any,
    ) -> list[Turn]:
        """As `generate`, several prompts one after the other on the same cache of `context`
        positions."""
        model = self.deployed.model
        first, *later = [
            self.encode(turn) if isinstance(turn, str) else [int(token) for token in turn]
            for turn in turns
        ]
        case = {
            "prompt": first,
            "later": later,
            "max_new": max_new,
            "sampling": dict(sampling or {}),
            "stop_ids": prompts.stop_ids(model) if stop else [],
        }
        most = min(context, model.hyperparameters.context)
        log = self.run("generate", {"cases": [case], "context": most}, **more)
        return [
            Turn(
                tuple(turn["tokens"]),
                prompts.decode(model, turn["tokens"]),
                turn["finish"],
                tuple(turn["times_s"]),
            )
            for turn in log.data("case")
        ]

    def run(
        self,
        job: str,
        parameters: Mapping[str, Any],
        *,
        timeout_s: float = 120.0,
        engine: Mapping[str, Any] | None = None,
        choice: EngineChoice | None = None,
        model: PreparedModel | None = None,
        cancel: Callable[[], bool] = lambda: False,
    ) -> RunLog:
        """Any job of `engine.measure` to its end; what it told. `engine` are fields of
        engine.options.EngineOptions in place of the board's own, or of `choice`. `model` is another
        one that was put on the board. When `cancel` says so, the run is ended: a BoardError.

        Raises DecodeFailed when the engine fails or is not done in `timeout_s`, BoardError when the
        board does.
        """
        how = self._with(choice or self.deployed.engine, engine)
        context, log, left = self._attempt(
            job, parameters, timeout_s, timeout_s, how, model or self.deployed.model, cancel
        )
        try:
            _require_good(context, log, job)
        except BoardError as error:
            self.deployed.stale = self.deployed.stale or error.kind == "board-reset"
            raise
        self._require_clean(job, left)
        return log

    def attempt(
        self,
        job: str,
        parameters: Mapping[str, Any],
        *,
        timeout_s: float = 120.0,
        stall_s: float | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> RunLog:
        """As `run`, but whatever the end: all that it told, for a judge of one's own. An engine
        that is silent for `stall_s` is ended.

        Raises BoardError when the board cannot be reached, or cannot be cleaned afterwards.
        """
        stall_s = timeout_s if stall_s is None else stall_s
        how = self._with(self.deployed.engine, engine)
        _, log, left = self._attempt(job, parameters, timeout_s, stall_s, how, self.deployed.model)
        self.deployed.stale = self.deployed.stale or log.status == "board-reset"
        self._require_clean(job, left)
        return log

    @staticmethod
    def _with(choice: EngineChoice, engine: Mapping[str, Any] | None) -> EngineChoice:
        if not engine:
            return choice
        return dataclasses.replace(choice, options=dataclasses.replace(choice.options, **engine))

    def _attempt(
        self,
        job: str,
        parameters: Mapping[str, Any],
        timeout_s: float,
        stall_s: float,
        choice: EngineChoice,
        model: PreparedModel,
        cancel: Callable[[], bool] = lambda: False,
    ) -> tuple[StageContext, RunLog, list[str]]:
        """What it ran in, what it told, and what of it is still alive."""
        there = self.deployed
        context = StageContext(
            board=there.board,
            facts=there.facts,
            model=model,
            options=BringupOptions(),
            run_id=f"{runs_of_tests(there.store)}{uuid.uuid4().hex}",
            remote_package=there.deployment.paths[model.sha256],
            cache=self._folder,
            engine=choice,
        )
        spec = make_spec(context, job, dict(parameters), deadline_s=timeout_s, stall_s=stall_s)
        plan = Plan(spec, None, timeout_s)
        log, left = carry_out(there, context, plan, self._folder, cancel)
        return context, log, left

    def _require_clean(self, job: str, left: Sequence[str]) -> None:
        if left:
            raise BoardError(
                self.deployed.board.name,
                "busy",
                f"the run of {job} left {'; '.join(left)}",
                expected="nothing of a run on the board after its end",
                remedy="restart the board if not even SIGKILL ends it",
            )


def carry_out(
    there: Deployed,
    context: StageContext,
    plan: Plan,
    folder: Path,
    cancel: Callable[[], bool] = lambda: False,
) -> tuple[RunLog, list[str]]:
    """A run from its start to its clean-up: what it told, and what could not be cleaned up.

    What it tells is copied into `folder`. Raises BoardError.
    """
    name, spec = there.board.name, plan.spec
    remote = lifecycle.start(
        there.session,
        there.deployment,
        spec,
        plan.inputs,
        environment=environment_for(there.board.environment, context.model),
        deadline=Deadline.after(START_S, f"starting {spec.job}"),
    )
    try:
        log = lifecycle.follow(
            there.connect,
            remote,
            folder / spec.run_id,
            deadline=Deadline.after(spec.deadline_s + COLLECT_S, f"{spec.job} on {name}"),
            cancel=cancel,
        )
    finally:
        limit = Deadline.after(CLEAN_S, f"cleaning {name}")
        left = lifecycle.clean_up(there.connect(), there.deployment, remote, limit)
    return log, left


def _require_good(context: StageContext, log: RunLog, job: str) -> None:
    verdict = failures.judge_failure(context, log, job)
    if verdict is None:
        return
    told = "\n".join([verdict.headline, *(check.sentence for check in verdict.checks)])
    if verdict.outcome is Outcome.FAIL:
        failed = DecodeFailed(told)
        failed.verdict = verdict
        raise failed
    raise BoardError(context.board.name, "engine", verdict.headline, remedy=verdict.remedy or "")
