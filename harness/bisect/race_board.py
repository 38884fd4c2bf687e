"""Trials of the search for a race on a board: many in each run, asked for ahead.

A run on a board takes a second or more to start, a trial milliseconds. So a run is given the
question that stands and those that may follow it, for either result, and what it tells is kept
until it is asked for. A question is repeated as often as passes hardly change what is asked next,
which the search says, and ends with its first failure.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.bisect.race import RaceSearch, Verdict
from harness.bisect.sets import Configuration, Question
from harness.bisect.trials import Result, Trial
from harness.errors import BoardError, HarnessError
from harness.jobs import failures
from harness.triage.case import signal_name

if TYPE_CHECKING:
    from harness.farm.decoding import DecodeSession
    from harness.jobs.runlog import RunLog

JOB = "race"
PROMPT_TOKENS = 4
AHEAD = 15  # questions of a run: four results ahead
BATCH_S = 8.0  # that the trials of a run may take together
FIRST_S = 0.05  # of a trial without delays, before one was timed
STARTUP_S = 120.0  # for the engine to load a large model, beside its trials
PATIENCE = 10.0  # times longer than expected, trials are waited for


@dataclasses.dataclass(frozen=True)
class Told:
    """How one trial ended on the board."""

    result: Result
    signature: str | None
    run: str | None
    seconds: float | None = None
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Decode:
    """What each trial decodes: a prompt, `steps` steps, on a cache of `context` positions. Results
    that are held back are late by `delay_s`."""

    prompt: Sequence[int]
    steps: int
    context: int
    delay_s: float


class Unstable(Exception):
    """Everything synchronous, the board does not give the same numbers again."""


class RaceBoard:
    """Makes trials on a board. `ask` gives one; most of them were made before it was asked for."""

    def __init__(self, session: DecodeSession, decode: Decode, steps: Sequence[str]) -> None:
        self._session, self._decode, self._steps = session, decode, tuple(steps)
        self._ready: dict[Configuration, deque[Told]] = {}
        self._reference: Mapping[str, Any] | None = None
        self._trial_s = FIRST_S
        self.runs = 0

    def known(self, configuration: Configuration) -> bool:
        """Whether the next trial of it was made already."""
        return bool(self._ready.get(configuration))

    def ask(self, configuration: Configuration, ahead: Callable[[], Iterator[Question]]) -> Told:
        """The next trial of a configuration. `ahead` tells the questions to make trials of, this
        one first. Raises Unstable, and HarnessError when the engine cannot make any."""
        if not self.known(configuration):
            try:
                self._run(list(self._affordable(ahead())))
            except BoardError as error:
                return Told(Result.INFRA, error.kind, None, evidence={"error": str(error)})
        ready = self._ready.get(configuration)
        if not ready:  # the run ended before it came to this one
            return Told(Result.INFRA, "no-trial", None, evidence={"error": "the run was lost"})
        return ready.popleft()

    def _affordable(self, questions: Iterator[Question]) -> Iterator[Question]:
        """The first, and so many more as fit into a run."""
        left = BATCH_S
        for count, question in enumerate(questions, 1):
            each = self._seconds(question.configuration)
            if count > 1 and each > left:
                return
            repeats = max(1, min(question.repeats, int(left / each)))
            left -= each * repeats
            yield dataclasses.replace(question, repeats=repeats)
            if count == AHEAD:
                return

    def _seconds(self, configuration: Configuration) -> float:
        """What a trial takes at most: delays on one part after the other."""
        return self._trial_s + (
            self._decode.delay_s * len(configuration.delayed) * self._decode.steps
        )

    def _run(self, questions: list[Question]) -> None:
        """Raises BoardError, Unstable, HarnessError."""
        expected_s = sum(self._seconds(q.configuration) * q.repeats for q in questions)
        log = self._session.attempt(
            JOB,
            {
                "prompt": list(self._decode.prompt),
                "steps": self._decode.steps,
                "context": self._decode.context,
                "delay_s": self._decode.delay_s,
                "reference": self._reference,
                "questions": [self._plain(question) for question in questions],
            },
            timeout_s=STARTUP_S + PATIENCE * expected_s,
        )
        self.runs += 1
        unstable, told = log.all_data("unstable"), log.all_data("reference")
        if unstable:
            raise Unstable(str(unstable[-1]))
        if told:
            self._reference = told[-1]
        self._keep(log, questions)

    def _plain(self, question: Question) -> dict[str, Any]:
        def names(chosen: frozenset[str]) -> str | list[str]:
            return "all" if chosen == set(self._steps) else sorted(chosen)

        configuration = question.configuration
        return {
            "on": names(configuration.on),
            "delayed": names(configuration.delayed),
            "repeats": question.repeats,
        }

    def _keep(self, log: RunLog, questions: Sequence[Question]) -> None:
        """What the run told of trials, and of the one that it died in."""
        last: tuple[int, Told] | None = None
        repeats = 0
        for value in log.all_data("trial"):
            number = int(value["question"])
            told = Told(
                Result.FAIL if value["result"] == "fail" else Result.PASS,
                value.get("signature"),
                log.run_id,
                float(value["seconds"]),
                {name: value[name] for name in ("step", "overlaps") if name in value},
            )
            if not questions[number].configuration.delayed:
                self._trial_s = 0.5 * (self._trial_s + float(value["seconds"]))
            repeats = repeats + 1 if last is not None and last[0] == number else 1
            last = (number, told)
            self._add(questions[number], told)
        signature = self._death(log)
        if signature is None:
            return
        at = 0
        if last is not None:
            at = last[0]
            if last[1].result is not Result.PASS or repeats >= questions[at].repeats:
                at += 1
        if at < len(questions):
            self._add(questions[at], Told(Result.FAIL, signature, log.run_id))

    def _add(self, question: Question, told: Told) -> None:
        self._ready.setdefault(question.configuration, deque()).append(told)

    def _death(self, log: RunLog) -> str | None:
        """The signature of an engine that ended in the middle of a trial. Raises BoardError when
        the board failed, HarnessError when the engine cannot make trials at all."""
        board = self._session.deployed.board.name
        if log.status == "finished":
            return None
        if log.status in ("lost", "board-lost", "board-reset", "cancelled"):
            if not log.all_data("trial"):
                kind = "board-reset" if log.status == "board-reset" else "board-lost"
                raise BoardError(board, kind, log.reason or "the run was lost")
            return None
        error = failures.first_error(log)
        if not log.all_data("steps"):  # told before the first trial
            found = str(error.get("message")) if error is not None else log.reason
            raise HarnessError(
                f"the engine could not make a trial: {found or log.status}",
                where=board,
                remedy="bring the model up on the board first: `harness bringup`",
            )
        if error is not None:
            return str(error.get("kind", "error"))
        crash = failures.unplanned_exit(log)
        if crash is not None and crash.get("signal"):
            return f"died by {signal_name(crash['signal'])}"
        return "hangs" if log.status in ("hung", "deadline") else f"ended as {log.status}"


def ahead(make: Callable[[], RaceSearch], told: Sequence[Told]) -> Iterator[Question]:
    """The question that stands after `told`, and those that follow it for either result, the
    nearest first."""
    paths: deque[tuple[Told, ...]] = deque([()])
    while paths:
        path = paths.popleft()
        search = replay(make, [*told, *path])
        question = search.ask()
        if isinstance(question, Verdict):
            continue
        yield question
        fails = Told(Result.FAIL, search.signature, None)
        paths.append((*path, *[Told(Result.PASS, None, None)] * question.repeats))
        paths.append((*path, fails))


def replay(make: Callable[[], RaceSearch], told: Sequence[Told]) -> RaceSearch:
    """A search that has been told all this, as far as it goes."""
    search = make()
    for item in told:
        if isinstance(search.ask(), Verdict):
            break
        search.tell(item.result, item.signature)
    return search


def retrace(search: RaceSearch, kept: Sequence[Trial], steps: Sequence[str]) -> RaceSearch:
    """The search, told the trials that are stored. Raises HarnessError where it would ask for
    another one by now: another version of it made them."""
    for number, trial in enumerate(kept):
        if trial.result is Result.INFRA:
            continue
        question, told = search.ask(), from_trial(trial)
        if isinstance(question, Verdict) or as_trial(question, steps, told) != trial:
            raise HarnessError(
                f"trial {number} that is kept of the interrupted search is none that this version "
                "of the harness would make",
                remedy="give the same command with --fresh",
            )
        search.tell(told.result, told.signature)
    return search


def as_trial(question: Question, steps: Sequence[str], told: Told) -> Trial:
    """For the store. A set of steps is told by the shorter of what is in it and what is not."""

    def names(chosen: frozenset[str]) -> dict[str, Any]:
        inside = [step for step in steps if step in chosen]
        outside = [step for step in steps if step not in chosen]
        if len(inside) <= len(outside):
            return {"only": inside}
        return {"all_but": outside}

    configuration = question.configuration
    return Trial(
        phase=question.phase,
        subject={"on": names(configuration.on), "delayed": names(configuration.delayed)},
        result=told.result,
        signature=told.signature,
        seconds=told.seconds,
        run=told.run,
        evidence=told.evidence,
    )


def from_trial(trial: Trial) -> Told:
    """What a stored trial told."""
    return Told(trial.result, trial.signature, trial.run, trial.seconds, trial.evidence)
