"""Stage 2, accuracy: does the engine compute what the model says, and if not, which op is first?

The board runs every op twice: fed the reference's inputs (local, which blames) and on its own
outputs (free, which shows how errors drift). See engine/measure/alignment.py for the board's part
and comparison.py for the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.architectures import family_named
from harness.jobs import failures, prompts, references
from harness.jobs.agreement import compare_text, logit_noise, logits_agreement
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.comparison import compare_all, first_failure
from harness.jobs.details import AccuracyDetails, LogitsAgreement, OpError, TextComparison
from harness.verdicts import Check, Outcome, Verdict, worst

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

Tokens = npt.NDArray[np.int64]

MOST_POSITIONS = 512  # of the teacher-forced text: its logits travel back


class AccuracyStage:
    """See the module."""

    name = "accuracy"
    order = 2
    needs_model = True

    def plan(self, context: StageContext) -> Plan:
        tokens, rows, question = subject(context)
        inputs = references.alignment_inputs(context.model, tokens, rows, question)
        new = new_tokens(context, question)
        parameters: dict[str, object] = {
            "context": max(len(tokens), len(question) + new),
            "max_new": new,
            "stop_ids": prompts.stop_ids(context.model),
        }
        spec = make_spec(context, "alignment", parameters, deadline_s=900.0)
        return Plan(spec, inputs, seconds_hint=10.0 + 0.1 * (new + 6 * len(rows)))

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        tokens, rows, question = subject(context)
        aligned = references.aligned(context.model, tokens, rows)
        hp = context.model.hyperparameters
        program = family_named(hp.architecture).program(hp)
        free_told = log.data("free")
        free = log.arrays("free") if free_told["positions"] or "free" in array_names(log) else {}
        local = log.arrays("local")
        ops = [
            *compare_all(program.ops, "local", local, aligned.reference, aligned.local),
            *compare_all(program.ops, "free", free, aligned.reference, aligned.free),
        ]
        shifted = log.arrays("logits")["shifted"]
        logits = logits_agreement(aligned.logits, shifted)
        noise = logit_noise(
            aligned.logits[rows], free.get(program.output, np.zeros((0, hp.vocab), np.float32))
        )
        text_told = log.data("text")
        text = compare_text(context.model, question, text_told["tokens"], noise)
        repeat, taps = log.data("repeat"), log.data("taps")
        gates = (_repeatable(repeat), _probe(taps))
        first = first_failure(ops)
        budget = context.board.budget
        checks = (
            *gates,
            _finite(free_told, text_told),
            _ops(ops, first),
            _undisturbed(log.data("local")["disturbed"]),
            _cosine(ops, budget.min_cosine),
            _kl(logits, budget.max_kl),
            _top1(logits),
            _text(text, text_told),
        )
        outcome = worst([check.outcome for check in checks])
        trusted = all(gate.outcome == Outcome.PASS for gate in gates)
        culprit = _culprit(first, free_told) if trusted else None
        details = AccuracyDetails(
            ops=tuple(ops),
            first_bad_op=culprit,
            logits=logits,
            text=text,
            repeats=len(repeat["hashes"]),
            repeatable=gates[0].outcome == Outcome.PASS,
            hash_with_taps=taps["with"],
            hash_without_taps=taps["without"],
        )
        return Verdict(
            outcome=outcome,
            headline=failures.short(_headline(outcome, checks, ops, first, logits, text, culprit)),
            checks=checks,
            culprit=culprit if outcome == Outcome.FAIL else None,
            remedy=_remedy(outcome, checks, culprit, log),
            details=details.model_dump(mode="json"),
        )


def subject(context: StageContext) -> tuple[Tokens, Tokens, list[int]]:
    """The text (N,), the rows (P,) at which ops are compared, and the question's ids."""
    options, model = context.options, context.model
    count = min(options.accuracy_positions, MOST_POSITIONS, model.hyperparameters.context - 1)
    tokens = prompts.text_tokens(model, count, options.seed)
    rows = references.spread_rows(count, min(options.accuracy_rows, count))
    question = prompts.question(model)[: model.hyperparameters.context // 2]
    return tokens, rows, question


def new_tokens(context: StageContext, question: Sequence[int]) -> int:
    """Tokens to generate: what was asked for, as far as the model's context goes."""
    room = context.model.hyperparameters.context - len(question)
    return max(1, min(context.options.accuracy_tokens, room))


def array_names(log: RunLog) -> set[str]:
    return {str(data.get("name")) for data in failures.of_kind(log, "array")}


def _repeatable(told: Mapping[str, Any]) -> Check:
    different = len(set(told["hashes"]))
    good = different == 1
    return Check(
        name="repeatable",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=different,
        limit=1,
        unit="different results",
        sentence=f"{len(told['hashes'])} runs of the same {told['steps']} steps gave "
        + ("the same bits." if good else f"{different} different results."),
    )


def _probe(taps: Mapping[str, str]) -> Check:
    good = taps["with"] == taps["without"]
    return Check(
        name="taps_harmless",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured="equal" if good else "different",
        limit="equal",
        sentence="Looking at the ops' outputs "
        + ("does not change the result." if good else "changes the result: no op can be named."),
    )


def _finite(free: Mapping[str, Any], text: Mapping[str, Any]) -> Check:
    stopped = free.get("stopped") or text.get("stopped")
    return Check(
        name="finite",
        outcome=Outcome.FAIL if stopped else Outcome.PASS,
        measured=str(stopped["op"]) if stopped else "finite",
        limit="finite",
        sentence=f"The engine stopped at bad numbers: {stopped['message']}."
        if stopped
        else "No NaN or infinity anywhere.",
    )


def _ops(ops: Sequence[OpError], first: OpError | None) -> Check:
    local = [row for row in ops if row.mode == "local"]
    bad = [row for row in local if row.outcome == Outcome.FAIL]
    warned = [row for row in local if row.outcome == Outcome.WARN]
    if first is not None:
        sentence = (
            f"{len(bad)} of {len(local)} ops are wrong on the reference's own inputs; the first is "
            f"{first.op}: {first.reason}."
        )
    elif warned:
        sentence = f"{len(warned)} ops are doubtful, the first is {warned[0].op}: "
        sentence += f"{warned[0].reason}."
    else:
        top = max(local, key=lambda row: row.worst_row_rel_l2 or 0.0)
        sentence = (
            f"All {len(local)} ops agree on the reference's inputs; the largest error is "
            f"{top.worst_row_rel_l2 or 0.0:.1e} of the norm, in {top.op}."
        )
    return Check(
        name="ops_local",
        outcome=Outcome.FAIL if bad else Outcome.WARN if warned else Outcome.PASS,
        measured=len(bad),
        limit=0,
        unit="wrong ops",
        sentence=sentence,
    )


def _undisturbed(disturbed: Sequence[str]) -> Check:
    return Check(
        name="cache_undisturbed",
        outcome=Outcome.FAIL if disturbed else Outcome.PASS,
        measured=len(disturbed),
        limit=0,
        unit="caches",
        sentence=f"An append changes other slots too, first in {disturbed[0]}."
        if disturbed
        else "Appending to the KV cache writes its own slot and no other.",
    )


def _cosine(ops: Sequence[OpError], limit: float) -> Check:
    known = [row for row in ops if row.mode == "local" and row.cosine is not None]
    if not known:
        return Check(
            name="min_cosine", outcome=Outcome.FAIL, measured=None, limit=limit,
            sentence="No op gave finite numbers.",
        )  # fmt: skip
    low = min(known, key=lambda row: row.cosine if row.cosine is not None else 1.0)
    good = low.cosine is not None and low.cosine >= limit
    return Check(
        name="min_cosine",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=low.cosine,
        limit=limit,
        sentence=f"The lowest cosine of an op's output is {low.cosine:.6f} in {low.op} "
        f"(at least {limit:g}).",
    )


def _kl(logits: LogitsAgreement, limit: float) -> Check:
    good = logits.positions > 0 and logits.mean_kl <= limit
    return Check(
        name="mean_kl",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=logits.mean_kl if logits.positions else None,
        limit=limit,
        unit="nats",
        sentence=f"Mean KL divergence over {logits.positions} positions is {logits.mean_kl:.2g} "
        f"({logits.mean_kl_low:.2g} to {logits.mean_kl_high:.2g}), at most {limit:g}."
        if logits.positions
        else "No logits came back, so there is no divergence to judge.",
    )


def _top1(logits: LogitsAgreement) -> Check:
    return Check(
        name="top1",
        outcome=Outcome.PASS,
        measured=logits.top1,
        limit=None,
        sentence=f"The most likely token is the reference's at {logits.top1:.1%} of "
        f"{logits.positions} positions (95 %: {logits.top1_low:.1%} to {logits.top1_high:.1%}).",
    )


def _text(text: TextComparison, told: Mapping[str, Any]) -> Check:
    finish = told["finish"]
    if text.first_divergence is None:
        outcome, measured = Outcome.PASS, "identical"
        sentence = f"All {text.tokens} generated tokens are the reference's (ended: {finish})."
    elif text.margin is None:
        outcome, measured = Outcome.FAIL, "no text"
        sentence = f"No text was generated (ended: {finish})."
    else:
        measured = f"token {text.first_divergence}"
        outcome = Outcome.PASS if text.near_tie else Outcome.FAIL
        kind = "a near tie" if text.near_tie else "not a near tie"
        sentence = (
            f"The text leaves the reference's at token {text.first_divergence} of {text.tokens}, "
            f"{kind}: the reference prefers its own token by {text.margin:.2g} logits, noise is "
            f"{text.noise:.2g}."
        )
    if finish == "not finite":
        outcome = Outcome.FAIL
    return Check(
        name="text", outcome=outcome, measured=measured, limit="identical or a near tie",
        sentence=sentence,
    )  # fmt: skip


def _culprit(first: OpError | None, free: Mapping[str, Any]) -> str | None:
    """The first op wrong on the reference's inputs; else the op that the engine itself caught
    writing bad numbers from good ones."""
    if first is not None:
        return first.op
    stopped = free.get("stopped")
    return str(stopped["op"]) if stopped else None


def _headline(
    outcome: Outcome,
    checks: Sequence[Check],
    ops: Sequence[OpError],
    first: OpError | None,
    logits: LogitsAgreement,
    text: TextComparison,
    culprit: str | None,
) -> str:
    if outcome == Outcome.FAIL:
        if culprit is not None and first is not None:
            return f"{culprit} is the first op that goes wrong: {first.reason}"
        if culprit is not None:
            return f"bad numbers begin in {culprit}"
        return next(check.sentence for check in checks if check.outcome == Outcome.FAIL)
    if outcome == Outcome.WARN:
        return next(check.sentence for check in checks if check.outcome == Outcome.WARN)
    count = sum(row.mode == "local" for row in ops)
    same = "identical" if text.first_divergence is None else "equal until a near tie"
    return (
        f"{count} ops agree, KL {logits.mean_kl:.1g}, top-1 {logits.top1:.0%}, "
        f"{text.tokens} tokens {same}"
    )


def _remedy(
    outcome: Outcome, checks: Sequence[Check], culprit: str | None, log: RunLog
) -> str | None:
    if outcome != Outcome.FAIL:
        return None
    fault = failures.planted_fault(log)
    if fault:
        return f"a fault is planted on this board (ENGINE_FAULT={fault}): unset it"
    bad = next(check.name for check in checks if check.outcome == Outcome.FAIL)
    if bad == "repeatable":
        return "the same steps give other bits: a race, or memory that is read before it is written"
    if bad == "taps_harmless":
        return "taps must copy: look for an op that writes into what another one still reads"
    if culprit is not None:
        return f"compare {culprit} with its definition in engine/units/reference.py"
    if bad == "mean_kl":
        return "each op is right but together they drift: keep more layers in a finer scheme"
    return "ops are right one by one: look at the cache, positions and sampling between steps"


STAGE = AccuracyStage()
