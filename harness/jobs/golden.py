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
    if not told:
        nothing = "The run told no golden generation."
        return (
            Check(name="golden_right", outcome=Outcome.FAIL, measured=None, limit="the reference's",
                  sentence=nothing),
            Check(name="golden_same", outcome=Outcome.FAIL, measured=None, limit="equal",
                  sentence=nothing),
        )  # fmt: skip
    tokens = [int(token) for token in told[0]["tokens"]]
    definition = references.definition_of(context.engine.options)
    prompt = golden_prompt(context.model)
    checked = references.checked_text(context.model, definition, prompt, tokens)
    at = checked.first_divergence
    deficit = 0.0 if at is None else float(checked.deficit[at])
    right = at is None or deficit <= 2 * noise_of(context)
    lossy = () if references.is_exact(definition) else (_sensible(context.model, tokens),)
    return (
        Check(
            name="golden_right",
            outcome=Outcome.PASS if right else Outcome.FAIL,
            measured=str(told[0]["hash"]),
            limit="the reference's",
            sentence=f"{len(tokens)} golden tokens are the reference's."
            if right
            else f"Golden token {at} is wrong: the reference prefers another by {deficit:.2g} "
            "logits. No speed counts before the text is right.",
        ),
        *lossy,
        _same(told),
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
