"""Stage 2, accuracy: does the engine compute what the model says, and if not, which op is first?

The board runs every op fed the reference's inputs, as a decode step (local) and as a prefill, and
on its own outputs (free). The first two blame; the third shows how errors drift, and finds what
goes wrong between ops. See engine/measure/alignment.py for the board's part, comparison.py for the
rule and accuracy_checks.py for the acceptance lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.measure.alignment import REPEAT_STEPS, REPEATS, last_piece
from harness.jobs import accuracy_checks as checked
from harness.jobs import failures, prompts, references
from harness.jobs.agreement import compare_text, logit_noise, logits_agreement, noise_of
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.comparison import compare_all, first_failure, logit_drift
from harness.jobs.completeness import Returned, Wanted, gather
from harness.jobs.details import AccuracyDetails, LogitsAgreement, OpError, TextComparison
from harness.jobs.memory import Extent
from harness.jobs.pace import slowest_s
from harness.verdicts import Check, Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.deploy.models import PreparedModel
    from harness.jobs.references import Aligned
    from harness.jobs.runlog import RunLog

Tokens = npt.NDArray[np.int64]

MOST_POSITIONS = 512  # of the teacher-forced text: its logits travel back
LEAST_DEADLINE_S = 900.0


class AccuracyStage:
    """See the module."""

    name = "accuracy"
    order = 2
    needs_model = True
    timed = False

    def extent(self, context: StageContext) -> Extent:
        tokens, _, question = subject(context)
        positions = max(len(tokens), len(question) + new_tokens(context, question))
        return Extent(positions, logits=len(tokens))

    def plan(self, context: StageContext) -> Plan:
        tokens, rows, question = subject(context)
        definition = references.definition_of(context.engine.options)
        passages = further(context, tokens)
        inputs = references.alignment_inputs(
            context.model, definition, tokens, rows, question, passages
        )
        new = new_tokens(context, question)
        parameters: dict[str, object] = {
            "context": max(len(tokens), len(question) + new),
            "max_new": new,
            "stop_ids": prompts.stop_ids(context.model),
        }
        steps = count_steps(tokens, rows, question, new) + passages.size
        deadline_s = max(LEAST_DEADLINE_S, slowest_s(context.model, steps))
        # The text is run with taps, and without, before the next word.
        stall_s = slowest_s(context.model, 3 * len(tokens) + len(question))
        spec = make_spec(context, "alignment", parameters, deadline_s=deadline_s, stall_s=stall_s)
        return Plan(spec, inputs, seconds_hint=10.0 + 0.1 * (new + 6 * len(rows)))

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        model = context.model
        tokens, rows, question = subject(context)
        definition = references.definition_of(context.engine.options)
        aligned = references.aligned(model, definition, tokens, rows)
        back = gather(log, wanted(context, aligned, question))
        ops = compared(model, definition, aligned, back)
        exact = references.is_exact(definition)
        noise = logit_noise(aligned.noise) if exact else noise_of(context).between
        naive = naive_drift(ops)
        if not exact:
            naive = max(naive, aligned.drift, scheme_drift(aligned))
        drifted = logit_drift(aligned.logits, back.logits, naive)
        pairs = [(aligned.plain, back.logits)]
        for passage, got in zip(further(context, tokens), back.passages, strict=True):
            pairs.append((references.plain_logits(model, passage), got))
        logits = logits_agreement(pairs)
        judging = references.judging(definition)
        text = compare_text(model, judging, question, back.tokens, noise)
        gates = (checked.repeatable(back, REPEATS), checked.probe(back))
        first = first_failure(ops)
        budget = context.board.budget
        stopped = back.free_stopped is not None
        checks = (
            back.check(),
            *gates,
            checked.finite(back),
            checked.alone(ops, "local"),
            *([checked.alone(ops, "prefill")] if last_piece(rows) else []),
            checked.drift(ops, drifted, first, stopped=stopped),
            checked.undisturbed(back.disturbed),
            checked.lowest_cosine(ops, budget.min_cosine),
            checked.divergence(logits, budget.max_kl, words(definition), stopped=stopped),
            checked.top1(logits),
            checked.same_text(text, back),
        )
        outcome = worst([check.outcome for check in checks])
        trusted = all(gate.outcome == Outcome.PASS for gate in gates)
        culprit = _culprit(first, ops, back) if trusted else None
        details = AccuracyDetails(
            ops=tuple(ops),
            first_bad_op=culprit,
            logits=logits,
            text=text,
            repeats=len(back.hashes),
            repeatable=gates[0].outcome == Outcome.PASS,
            hash_with_taps=back.taps[0],
            hash_without_taps=back.taps[1],
        )
        return Verdict(
            outcome=outcome,
            headline=one_line(_headline(outcome, checks, ops, first, logits, text, culprit)),
            checks=checks,
            culprit=culprit if outcome == Outcome.FAIL else None,
            remedy=_remedy(outcome, checks, culprit, log, _unstable(context, back)),
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


def further(context: StageContext, tokens: Tokens) -> Tokens:
    """(Q, N): texts beside `tokens` (N,) whose logits are compared."""
    count = context.options.accuracy_prompts - 1
    return prompts.passages(context.model, count, len(tokens), context.options.seed)


def new_tokens(context: StageContext, question: Sequence[int]) -> int:
    """Tokens to generate: what was asked for, as far as the model's context goes."""
    room = context.model.hyperparameters.context - len(question)
    return max(1, min(context.options.accuracy_tokens, room))


def count_steps(tokens: Tokens, rows: Tokens, question: Sequence[int], new: int) -> int:
    """Tokens that the job computes in all: an upper bound of how often it reads the weights."""
    repeats = REPEATS * (8 + REPEAT_STEPS)
    return repeats + 2 * len(tokens) + 2 * len(rows) + len(question) + new


def wanted(context: StageContext, aligned: Aligned, question: Sequence[int]) -> Wanted:
    """What the plan asked the board for."""
    piece = last_piece(aligned.rows)
    return Wanted(
        positions=len(aligned.tokens),
        vocab=aligned.logits.shape[1],
        rows=len(aligned.rows),
        prefill_rows=piece[1] - piece[0] if piece else 0,
        reference=aligned.reference,
        repeats=REPEATS,
        max_new=new_tokens(context, question),
        stop_ids=prompts.stop_ids(context.model),
        passages=context.options.accuracy_prompts - 1,
    )


def words(definition: EngineOptions) -> str:
    """The schemes of few bits that a definition has beside the weights' own, "" for none."""
    found = []
    if definition.activations != "float":
        found.append(f"{definition.activations} activations")
    if definition.kv != "f32":
        found.append(f"{definition.kv} keys and values")
    return " and ".join(found)


def compared(
    model: PreparedModel, definition: EngineOptions, aligned: Aligned, back: Returned
) -> list[OpError]:
    """The alignment table: every op alone (one token, several tokens), then free."""
    program = references.program_for(model, definition)
    want, naive = aligned.reference, aligned.local
    rows = compare_all(program.ops, "local", back.local, want, naive)
    piece = last_piece(aligned.rows)
    if piece is not None:
        start = piece[0]
        rows += compare_all(
            program.ops, "prefill", back.prefill, _from(want, start), _from(naive, start)
        )
    stopped = back.free_stopped is not None
    return rows + compare_all(
        program.ops,
        "free",
        back.free,
        want,
        aligned.free,
        shorter=stopped,
        scattered=not references.is_exact(definition),
    )


def naive_drift(ops: Sequence[OpError]) -> float:
    """The naive implementation's error in the logits when it runs on its own."""
    return next(row.base_rel_l2 for row in reversed(ops) if row.mode == "free")


def scheme_drift(aligned: Aligned) -> float:
    """What codes of few bits move the logits by, of the worst row's norm. An input between two
    codes may fall to either, and two right runs then differ by as much; whether that happened to
    the naive one along this text is luck."""
    found = logit_drift(aligned.plain, aligned.logits, 0.0)
    return 0.0 if found is None else found.error


def _from(arrays: Mapping[str, references.Array], start: int) -> references.Arrays:
    return {name: array[start:] for name, array in arrays.items()}


def _culprit(first: OpError | None, ops: Sequence[OpError], back: Returned) -> str | None:
    """The first op wrong on the reference's inputs; else the op that the engine itself caught
    writing bad numbers from good ones."""
    if first is not None:
        return first.op
    stopped = back.free_stopped or back.text_stopped
    drifted = any(row.mode == "free" and row.outcome == Outcome.FAIL for row in ops)
    return None if stopped is None or drifted else str(stopped.get("op"))


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
            where = " in prefill" if first.mode == "prefill" else ""
            return f"{culprit} is the first op that goes wrong{where}: {first.reason}"
        if culprit is not None:
            return f"bad numbers begin in {culprit}"
    if outcome != Outcome.PASS:
        return next(check.sentence for check in checks if check.outcome == outcome)
    count = sum(row.mode == "local" for row in ops)
    same = "identical" if text.first_divergence is None else "equal until a near tie"
    return (
        f"{count} ops agree, KL {logits.mean_kl:.1g}, top-1 {logits.top1:.0%}, "
        f"{text.tokens} tokens {same}"
    )


def _unstable(context: StageContext, back: Returned) -> str:
    """What to do about results that differ from run to run."""
    in_order = set(back.hashes_in_order)
    race = f"`harness bisect race --board {context.board.name}` names it"
    if len(in_order) == 1:
        return f"one op after the other gives the same bits: a race between ops; {race}"
    if in_order:
        return (
            "even one op after the other gives other bits: memory that is read before it is "
            "written, or a race between threads of one op; try --engine-option threads=1"
        )
    if context.engine.options.executor == "sync":
        return (
            "the same steps give other bits: memory that is read before it is written, or a race "
            "between threads of one op; try --engine-option threads=1"
        )
    return f"the same steps give other bits: a race; {race}"


def _remedy(
    outcome: Outcome, checks: Sequence[Check], culprit: str | None, log: RunLog, unstable: str
) -> str | None:
    if outcome == Outcome.INVALID:
        return "run the stage again; if it stays so, the engine leaves out what it was asked for"
    if outcome != Outcome.FAIL:
        return None
    fault = failures.planted_fault(log)
    bad = next(check.name for check in checks if check.outcome == Outcome.FAIL)
    if bad == "repeatable":
        return unstable + (f" (a fault is planted: ENGINE_FAULT={fault})" if fault else "")
    if fault:
        return f"a fault is planted on this board (ENGINE_FAULT={fault}): unset it"
    if bad == "taps_harmless":
        return "taps must copy: look for an op that writes into what another one still reads"
    if bad == "complete":
        return "the engine sends shapes that the model does not have: look at its program"
    if culprit is not None:
        return f"compare {culprit} with its definition in engine/units/reference.py"
    if bad == "mean_kl":
        return "each op is right but together they drift: keep more layers in a finer scheme"
    return "ops are right one by one: look at prefill, the cache and positions between steps"


STAGE = AccuracyStage()
