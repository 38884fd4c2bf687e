"""The canary's judgement: a stored speed means nothing when the text beside it is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.jobs import prompts, references
from harness.jobs.agreement import noise_of
from harness.verdicts import Check, Outcome

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.jobs.base import StageContext
    from harness.jobs.runlog import RunLog

COUNT = 16  # tokens
SENSE = 1.0  # nats a token: written text that a model finds e times less likely than its own choice
QUESTION = "What is the capital of France?"


def golden_parameters(context: StageContext) -> dict[str, object]:
    """`golden` of a spec: prompt and number of tokens."""
    return {"prompt": golden_prompt(context.model), "count": COUNT}


def golden_count(context: StageContext) -> int:
    """Tokens that one golden generation reads and writes."""
    return len(golden_prompt(context.model)) + COUNT


def golden_prompt(model: PreparedModel) -> list[int]:
    limit = max(1, model.hyperparameters.context - COUNT)
    return prompts.question(model, QUESTION)[:limit]


def golden_hashes(log: RunLog) -> list[Mapping[str, Any]]:
    """Every golden generation that the run told, in order."""
    found: list[Mapping[str, Any]] = log.all_data("golden")
    return found


def judge_golden(context: StageContext, log: RunLog) -> tuple[Check, ...]:
    """Is the first one the reference's text, does it make sense where codes of few bits are in
    between, and are all of them the same?"""
    told = golden_hashes(log)
    same = (_same(told),) if told else (_nothing("golden_same", "equal"),)
    return (*judge_right(context, log), *same)


def judge_right(context: StageContext, log: RunLog) -> tuple[Check, ...]:
    """The checks of the first golden text alone."""
    told = golden_hashes(log)
    if not told:
        return (_nothing("golden_right", "the reference's"),)
    tokens = [int(token) for token in told[0]["tokens"]]
    definition = references.definition_of(context.engine.options)
    prompt = golden_prompt(context.model)
    judging = references.judging(definition)
    checked = references.checked_text(context.model, judging, prompt, tokens)
    at = checked.first_beyond(2 * noise_of(context).between)
    deficit = 0.0 if at is None else float(checked.deficit[at])
    right = at is None
    check = Check(
        name="golden_right",
        outcome=Outcome.PASS if right else Outcome.FAIL,
        measured=str(told[0]["hash"]),
        limit="the reference's",
        sentence=f"{len(tokens)} golden tokens are the reference's."
        if right
        else f"Golden token {at} is wrong: the reference prefers another by {deficit:.2g} "
        "logits. No speed counts before the text is right.",
    )
    if references.is_exact(definition):
        return (check,)
    return check, _sensible(context.model, tokens)


def _nothing(name: str, limit: str) -> Check:
    return Check(
        name=name,
        outcome=Outcome.FAIL,
        measured=None,
        limit=limit,
        sentence="The run told no golden generation.",
    )


def _sensible(model: PreparedModel, tokens: list[int]) -> Check:
    """Text that is right by its own definition may be nonsense all the same, when that definition
    has too few bits: what does the reference in floats think of it?"""
    checked = references.checked_text(model, references.PLAIN, golden_prompt(model), tokens)
    mean = float(checked.deficit.mean())
    good = mean <= SENSE
    return Check(
        name="golden_sensible",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=mean,
        limit=SENSE,
        unit="logits",
        sentence=f"The reference in floats prefers its own tokens to the golden ones by {mean:.2g} "
        f"logits on average, at most {SENSE:g}"
        + ("." if good else ": the scheme has too few bits for this model. No speed counts."),
    )


def compared(told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is a generation from before the work and one from after it."""
    return len(told) >= 2 and told[-1]["when"] == "after"


def _same(told: Sequence[Mapping[str, Any]]) -> Check:
    first = str(told[0]["hash"])
    other = next((item for item in told if str(item["hash"]) != first), None)
    if other is not None:
        outcome = Outcome.FAIL
        sentence = (
            f"The golden generation changed: {other['when']}, {other['at_s']:.0f} s into the run "
            f"(attempt {other['attempt']}), it gave other tokens than at the start."
        )
    elif compared(told):
        outcome = Outcome.PASS
        sentence = f"{len(told)} golden generations gave the same tokens."
    else:
        outcome = Outcome.INVALID
        sentence = (
            f"{len(told)} golden generation(s) and none after the work: whether the answers stay "
            "the same is unknown."
        )
    return Check(
        name="golden_same",
        outcome=outcome,
        measured=str(other["hash"]) if other else first,
        limit=first,
        sentence=sentence,
    )
