"""The search for a race on one board, from its command to its outcome: trials are kept as they are
made, and a search that was interrupted goes on where it stood."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.bisect.race import Outcome, RaceSearch, Verdict
from harness.bisect.race_board import (
    PROMPT_TOKENS,
    Decode,
    RaceBoard,
    Told,
    Unstable,
    ahead,
    as_trial,
    from_trial,
    retrace,
)
from harness.bisect.race_words import ALL, headline, missing_edge, reproducing, sentence
from harness.bisect.sets import Configuration, Question
from harness.bisect.trials import Result, Trial
from harness.errors import HarnessError
from harness.store.searches import Searches

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.deploy.models import PreparedModel
    from harness.farm.decoding import DecodeSession
    from harness.store import Store

KIND = "race"
CONTEXT = 64  # positions, of which a trial needs few


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a user asked for: `steps` of a trial; what is held back is late by `delay_s`."""

    delta: float = 0.01
    budget: int = 2000
    delays: bool = True
    steps: int = 4
    delay_s: float = 0.003


@dataclasses.dataclass(frozen=True)
class Plan:
    """What may run asynchronously: ops in program order, the part of the board each is on, and what
    the static check finds in their schedule."""

    steps: tuple[str, ...]
    parts: Mapping[str, str]
    findings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A finished search. `sentences` and `commands` go with the verdict's races, `posterior` with
    the last step that was searched for: (name, probability) of each that it could be."""

    search: str
    verdict: Verdict
    headline: str
    trials: int
    sentences: tuple[str, ...]
    commands: tuple[str, ...]
    posterior: tuple[tuple[str, float], ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "search": self.search,
            "outcome": self.verdict.outcome.value,
            "headline": self.headline,
            "reason": self.verdict.reason,
            "trials": self.trials,
            "interval": list(self.verdict.interval),
            "findings": list(self.verdict.findings),
            "posterior": [{"name": name, "probability": share} for name, share in self.posterior],
            "races": [
                {
                    **dataclasses.asdict(race),
                    "sentence": sentence_,
                    "command": command,
                }
                for race, sentence_, command in zip(
                    self.verdict.races, self.sentences, self.commands, strict=True
                )
            ],
        }


@dataclasses.dataclass(frozen=True)
class Watch:
    """Who hears how it goes: `asked` before a run on the board, `told` after each trial."""

    resumed: Callable[[str, int], None] = lambda search, trials: None
    asked: Callable[[RaceSearch, Question], None] = lambda search, question: None
    told: Callable[[RaceSearch, Question, Told], None] = lambda search, question, told: None


def plan_of(model: PreparedModel, options: EngineOptions) -> Plan:
    """The ops of a decode step as the board will run them. Raises PackageError."""
    from engine.decode import program_of
    from engine.package import Package
    from engine.program.happens_before import check
    from engine.program.schedule import derive
    from engine.runtime.slots import shared_memory

    with Package.open(model.package) as package:
        program = program_of(package, options)
        memory = shared_memory(program, package.tensors, np.dtype(np.float32).itemsize)
    schedule = derive(program, memory=memory)
    parts = {op_id: part for part, queue in schedule.queues.items() for op_id in queue}
    findings = tuple(str(finding) for finding in check(program, schedule, memory))
    return Plan(tuple(op.id for op in program.ops), parts, findings)


def decode_of(model: PreparedModel, wanted: Wanted) -> Decode:
    """The same prompt for every search of a model."""
    vocab, most = model.hyperparameters.vocab, model.hyperparameters.context
    prompt = np.random.default_rng(0).integers(vocab, size=PROMPT_TOKENS)
    context = min(CONTEXT, most)
    if PROMPT_TOKENS + wanted.steps > context:
        raise HarnessError(
            f"{wanted.steps} steps behind a prompt of {PROMPT_TOKENS} tokens",
            expected=f"at most {context - PROMPT_TOKENS}",
        )
    return Decode([int(token) for token in prompt], wanted.steps, context, wanted.delay_s)


def hunt(
    session: DecodeSession,
    wanted: Wanted,
    store: Store,
    command: Sequence[str],
    where: Sequence[str],
    watch: Watch,
    *,
    fresh: bool = False,
) -> Ended:
    """Searches on the board of `session`. `command` is what the user gave, `where` its options that
    name the board and what runs there. A search that was interrupted goes on, unless `fresh`.

    Raises HarnessError; its trials are kept all the same, and the search goes on next time.
    """
    there = session.deployed
    plan = plan_of(there.model, there.engine.options)
    decode = decode_of(there.model, wanted)
    searches, options = Searches(store), _options(session, wanted)
    board = there.board.name
    search_id = None if fresh else searches.interrupted(KIND, board, options)
    kept: list[Trial] = []
    if search_id is None:
        search_id = searches.begin(KIND, board, command, options)
    else:
        kept = searches.trials(search_id)
        watch.resumed(search_id, len(kept))

    def make() -> RaceSearch:
        return RaceSearch(
            plan.steps,
            delta=wanted.delta,
            budget=wanted.budget,
            delays=wanted.delays,
            findings=plan.findings,
        )

    history = [from_trial(trial) for trial in kept if trial.result is not Result.INFRA]
    search = retrace(make(), kept, plan.steps)
    trials = RaceBoard(session, decode, plan.steps)
    while True:
        question = search.ask()
        if isinstance(question, Verdict):
            break
        if not trials.known(question.configuration):
            watch.asked(search, question)
        try:
            told = trials.ask(question.configuration, lambda: ahead(make, history))
        except Unstable as error:
            question = Verdict(Outcome.NOT_A_RACE, f"{error}: look at it with accuracy or triage")
            break
        searches.add(search_id, as_trial(question, plan.steps, told))
        if told.result is not Result.INFRA:
            history.append(told)
        search.tell(told.result, told.signature)
        watch.told(search, question, told)
    ended = _ended(search_id, question, search, searches, plan, wanted, where)
    if question.outcome is not Outcome.BOARD_LOST:  # then the same command goes on with it
        searches.finish(
            search_id,
            question.outcome.value,
            ended.headline,
            culprits=[step for race in question.races for step in race.steps],
            confidence=min((race.probability for race in question.races), default=None),
            details=ended.as_json(),
        )
    return ended


def try_out(
    session: DecodeSession, wanted: Wanted, on: Sequence[str], delayed: Sequence[str], count: int
) -> tuple[int, list[Trial], Plan]:
    """`count` trials with these steps asynchronous ("all" of them is a word for it): failures,
    trials, what the steps are.

    Raises HarnessError, as for a step that the model has not.
    """
    there = session.deployed
    plan = plan_of(there.model, there.engine.options)
    on, delayed = (plan.steps if list(chosen) == [ALL] else chosen for chosen in (on, delayed))
    for step in (*on, *delayed):
        if step not in plan.steps:
            raise HarnessError(
                f"{there.model.name} has no step {step!r}",
                expected=f"one of {', '.join(plan.steps)}",
            )
    board = RaceBoard(session, decode_of(there.model, wanted), plan.steps)
    question = Question(Configuration(frozenset(on), frozenset(delayed)), 1, "try")
    trials: list[Trial] = []
    while len(trials) < count:
        left = count - len(trials)
        coming = [question] * left
        told = board.ask(question.configuration, functools.partial(iter, coming))
        if told.result is Result.INFRA:
            raise HarnessError(str(told.evidence.get("error")), where=there.board.name)
        trials.append(as_trial(question, plan.steps, told))
    return sum(trial.result is Result.FAIL for trial in trials), trials, plan


def _options(session: DecodeSession, wanted: Wanted) -> dict[str, Any]:
    """Everything that decides what the search does and what its trials are."""
    there = session.deployed
    return {
        **dataclasses.asdict(wanted),
        "model": there.model.sha256,
        "engine": there.engine_hash,
        "options": there.engine.options.to_mapping(),
        "environment": dict(there.board.environment),
    }


def _ended(
    search_id: str,
    verdict: Verdict,
    search: RaceSearch,
    searches: Searches,
    plan: Plan,
    wanted: Wanted,
    where: Sequence[str],
) -> Ended:
    trials = searches.trials(search_id)
    sentences = tuple(sentence(race, trials, plan.parts) for race in verdict.races)
    line = headline(verdict, wanted.delta)
    if len(verdict.races) == 1:
        line = f"{line}: {missing_edge(verdict.races[0], trials, plan.parts)}"
    commands = tuple(reproducing(race, where, plan.steps) for race in verdict.races)
    steps, shares = search.posterior(ended=True) or ((), ())
    posterior = tuple((step, float(share)) for step, share in zip(steps, shares, strict=True))
    return Ended(search_id, verdict, line, search.trials, sentences, commands, posterior)
