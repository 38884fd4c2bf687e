"""One trial of a search among options: the engine reads a text with some of them on.

The logits are compared with the reference in floats, which is the same for every set of options:
so losses can be compared, and what a scheme of few bits may lose counts as the board's budget says.
Where an engine computes in floats throughout, logits that leave the reference beyond the rule of
the accuracy stage fail too, however little that costs.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bisect.option_verdicts import Question
from harness.bisect.trials import Result, Trial
from harness.errors import BoardError, HarnessError
from harness.farm.decoding import DecodeFailed, DecodeSession
from harness.jobs import prompts, references
from harness.jobs.agreement import kl_rows
from harness.jobs.comparison import logit_drift
from harness.jobs.engines import EngineChoice
from harness.jobs.pace import slowest_s

if TYPE_CHECKING:
    from harness.bisect.option_space import Space
    from harness.farm.deployed import Deployed
    from harness.jobs.runlog import RunLog

ACCURACY = "logits"  # the signature of a text that is read wrongly
UNRESOLVED = "these options do not go together"
LEAST_DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """From where on logits fail: mean KL in nats; `positions` of the text, `singles` of them token
    by token."""

    kl: float
    positions: int = 64
    singles: int = 24


class OptionTrials:
    """Makes trials on one board."""

    def __init__(
        self,
        there: Deployed,
        space: Space,
        limits: Limits,
        *,
        seed: int,
        stop: Callable[[], bool],
    ) -> None:
        self._there, self._space, self._limits, self._stop = there, space, limits, stop
        most = there.model.hyperparameters.context - 1
        self._tokens = prompts.text_tokens(there.model, min(limits.positions, most), seed)
        self._plain = references.plain_logits(there.model, self._tokens)  # (N, V)

    def make(self, question: Question) -> Trial:
        """Raises BoardError when it was stopped; all other trouble of the board is a result."""
        started = time.monotonic()

        def trial(result: Result, signature: str | None = None, **more: Any) -> Trial:
            # In the order of the list, so that people can read it.
            on = [name for name in self._space.names if name in question.options]
            seconds = time.monotonic() - started
            return Trial(question.phase, {"on": on}, result, signature, seconds=seconds, **more)

        try:
            setting = self._space.setting(question.options)
        except ValueError as error:
            return trial(Result.OTHER, UNRESOLVED, evidence={"why": str(error)})
        with tempfile.TemporaryDirectory(prefix="harness-options-") as folder:
            try:
                log = self._run(EngineChoice(setting.engine, setting.pin), setting.layout, folder)
                return self._judged(trial, setting.engine, log)
            except DecodeFailed as error:
                return trial(Result.FAIL, signature_of(error), evidence={"why": str(error)[:2000]})
            except BoardError as error:
                if self._stop():
                    raise
                return trial(Result.INFRA, error.kind, evidence={"why": str(error)[:2000]})

    def _run(self, choice: EngineChoice, layout: str, folder: str) -> RunLog:
        there = self._there
        model = there.in_layout(layout)
        parameters = {
            "tokens": self._tokens.tolist(),
            "singles": self._limits.singles,
            "context": len(self._tokens) + 1,
        }
        deadline_s = max(LEAST_DEADLINE_S, slowest_s(model, len(self._tokens)))
        return DecodeSession(there, Path(folder)).run(
            "logits",
            parameters,
            timeout_s=deadline_s,
            choice=choice,
            model=model,
            cancel=self._stop,
        )

    def _judged(self, trial: Callable[..., Trial], options: Any, log: RunLog) -> Trial:
        told = log.all_data("logits")
        stopped = told[-1].get("stopped") if told else None
        if stopped:
            evidence = {"hash": told[-1].get("hash"), "why": str(stopped)}
            return trial(Result.FAIL, f"not finite in {stopped.get('op')}", evidence=evidence)
        try:
            logits = log.arrays("logits")["shifted"]
        except (HarnessError, KeyError, ValueError, zipfile.BadZipFile) as error:
            return trial(Result.INFRA, "protocol", evidence={"why": f"no logits came: {error}"})
        if logits.shape != self._plain.shape:
            why = f"logits of shape {logits.shape}, expected {self._plain.shape}"
            return trial(Result.FAIL, "shape", evidence={"why": why})
        loss = float(kl_rows(self._plain, logits).mean())
        drift = logit_drift(self._plain, logits, 0.0)
        exact = references.is_exact(references.definition_of(options))
        wrong = loss > self._limits.kl or (exact and drift is not None and drift.beyond)
        evidence = {"hash": told[-1].get("hash"), "drift": drift.error if drift else None}
        result = Result.FAIL if wrong else Result.PASS
        return trial(result, ACCURACY if wrong else None, value=loss, evidence=evidence)


def signature_of(error: DecodeFailed) -> str:
    """What makes two failures of an engine the same one: the check that failed, what it measured,
    and the op that is to blame."""
    verdict = error.verdict
    if verdict is None:
        return str(error).splitlines()[0][:118]
    words = [f"{check.name} {check.measured}" for check in verdict.checks[:1]]
    return " ".join([*words, *([f"in {verdict.culprit}"] if verdict.culprit else [])])
