"""The acceptance lines of the accuracy stage: each a number, its limit and a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from harness.jobs.comparison import ALONE, LogitDrift
from harness.jobs.completeness import Returned
from harness.jobs.details import LogitsAgreement, OpError, TextComparison
from harness.verdicts import Check, Outcome

HOW = {"local": "one token at a time", "prefill": "several tokens at once"}


def repeatable(back: Returned, repeats: int) -> Check:
    """FAIL for different results, INVALID for too few to tell."""
    different = len(set(back.hashes))
    enough = len(back.hashes) == repeats
    outcome = Outcome.FAIL if different > 1 else Outcome.PASS if enough else Outcome.INVALID
    return Check(
        name="repeatable",
        outcome=outcome,
        measured=different,
        limit=1,
        unit="different results",
        sentence=f"{len(back.hashes)} of {repeats} runs of the same {back.steps} steps gave "
        + (f"{different} different results." if different != 1 else "the same bits."),
    )


def probe(back: Returned) -> Check:
    told, good = all(back.taps), back.taps[0] == back.taps[1]
    outcome = Outcome.INVALID if not told else Outcome.PASS if good else Outcome.FAIL
    return Check(
        name="taps_harmless",
        outcome=outcome,
        measured="unknown" if not told else "equal" if good else "different",
        limit="equal",
        sentence="Whether looking at the ops' outputs changes the result is not known."
        if not told
        else "Looking at the ops' outputs "
        + ("does not change the result." if good else "changes the result: no op can be named."),
    )


def finite(back: Returned) -> Check:
    stopped = back.free_stopped or back.text_stopped
    return Check(
        name="finite",
        outcome=Outcome.FAIL if stopped else Outcome.PASS,
        measured=str(stopped.get("op")) if stopped else "finite",
        limit="finite",
        sentence=f"The engine stopped at bad numbers: {stopped.get('message')}."
        if stopped
        else "No NaN or infinity anywhere.",
    )


def alone(ops: Sequence[OpError], mode: str) -> Check:
    """Every op on the reference's inputs, in one of the modes `local` and `prefill`."""
    rows = [row for row in ops if row.mode == mode]
    bad, unknown, warned = (
        [row for row in rows if row.outcome == outcome]
        for outcome in (Outcome.FAIL, Outcome.INVALID, Outcome.WARN)
    )
    how = HOW[mode]
    if bad:
        sentence = (
            f"{len(bad)} of {len(rows)} ops are wrong on the reference's own inputs, {how}; the "
            f"first is {bad[0].op}: {bad[0].reason}."
        )
    elif unknown:
        sentence = (
            f"{len(unknown)} of {len(rows)} ops could not be compared, {how}; the first is "
            f"{unknown[0].op}: {unknown[0].reason}."
        )
    elif warned:
        sentence = f"{len(warned)} ops are doubtful, {how}; the first is {warned[0].op}: "
        sentence += f"{warned[0].reason}."
    else:
        top = max(rows, key=lambda row: row.worst_row_rel_l2 or 0.0)
        sentence = (
            f"All {len(rows)} ops agree on the reference's inputs, {how}; the largest error is "
            f"{top.worst_row_rel_l2 or 0.0:.1e} of the norm, in {top.op}."
        )
    found = [Outcome.FAIL] if bad else [Outcome.INVALID] if unknown else []
    return Check(
        name=f"ops_{mode}",
        outcome=(found or ([Outcome.WARN] if warned else [Outcome.PASS]))[0],
        measured=len(bad),
        limit=0,
        unit="wrong ops",
        sentence=sentence,
    )


def drift(
    ops: Sequence[OpError], logits: LogitDrift | None, first: OpError | None, *, stopped: bool
) -> Check:
    """What the engine does on its own, when each of its ops is right alone (`first` is None)."""
    free = [row for row in ops if row.mode == "free"]
    bad = [row for row in free if row.outcome == Outcome.FAIL]
    unknown = [row for row in free if row.outcome == Outcome.INVALID]
    outcome = Outcome.PASS
    if bad and first is None:
        outcome = Outcome.FAIL
        sentence = (
            "Errors appear only when the engine runs on its own: prefill, cache or positions. "
            f"{len(bad)} of {len(free)} ops drift, the first is {bad[0].op}: {bad[0].reason}."
        )
    elif logits is not None and logits.beyond and first is None:
        outcome = Outcome.FAIL
        sentence = (
            "Errors appear only when the engine runs on its own: prefill, cache or positions. "
            f"The logits of position {logits.position} are off by {logits.error:.2g} of their "
            f"norm, limit {logits.limit:.2g}."
        )
    elif bad and first is not None:
        sentence = f"{len(bad)} of {len(free)} ops drift, which {first.op} explains."
    elif unknown and stopped:
        sentence = "The engine's own run ended at bad numbers; up to there nothing drifts."
    elif unknown:
        outcome = Outcome.INVALID
        sentence = (
            f"{len(unknown)} of {len(free)} ops of the engine's own run could not be compared, "
            f"the first is {unknown[0].op}: {unknown[0].reason}."
        )
    else:
        sentence = f"All {len(free)} ops stay with the reference when the engine runs on its own."
    return Check(
        name="free_drift", outcome=outcome, measured=len(bad), limit=0, unit="drifting ops",
        sentence=sentence,
    )  # fmt: skip


def undisturbed(disturbed: Sequence[str]) -> Check:
    return Check(
        name="cache_undisturbed",
        outcome=Outcome.FAIL if disturbed else Outcome.PASS,
        measured=len(disturbed),
        limit=0,
        unit="caches",
        sentence=f"An append changes other slots too, first in {disturbed[0]}."
        if disturbed
        else "Appending to the KV cache writes its own slots and no other.",
    )


def lowest_cosine(ops: Sequence[OpError], limit: float) -> Check:
    rows = [row for row in ops if row.mode in ALONE]
    known = [(row.cosine, row) for row in rows if row.cosine is not None]
    if not known:
        broken = any(row.non_finite for row in rows)
        return Check(
            name="min_cosine", outcome=Outcome.FAIL if broken else Outcome.INVALID, measured=None,
            limit=limit, sentence="No op gave numbers that can be compared.",
        )  # fmt: skip
    low, row = min(known, key=lambda pair: pair[0])
    return Check(
        name="min_cosine",
        outcome=Outcome.PASS if low >= limit else Outcome.FAIL,
        measured=low,
        limit=limit,
        sentence=f"The lowest cosine of an op's output is {low:.6f} in {row.op}, {HOW[row.mode]} "
        f"(at least {limit:g}).",
    )


def divergence(logits: LogitsAgreement, limit: float, schemes: str, *, stopped: bool) -> Check:
    """Mean KL against the reference in floats, so that it tells what `schemes` of few bits lose.

    No logits at all: FAIL when the engine stopped, else INVALID.
    """
    if not logits.positions:
        return Check(
            name="mean_kl", outcome=Outcome.FAIL if stopped else Outcome.INVALID, measured=None,
            limit=limit, unit="nats",
            sentence="No logits came back, so there is no divergence to judge.",
        )  # fmt: skip
    return Check(
        name="mean_kl",
        outcome=Outcome.PASS if logits.mean_kl <= limit else Outcome.FAIL,
        measured=logits.mean_kl,
        limit=limit,
        unit="nats",
        sentence=f"Mean KL divergence over {logits.positions} positions{_texts(logits)} is "
        f"{logits.mean_kl:.2g} ({logits.mean_kl_low:.2g} to {logits.mean_kl_high:.2g}), at most "
        f"{limit:g}" + (f"; {schemes} against floats." if schemes else "."),
    )


def _texts(logits: LogitsAgreement) -> str:
    return f" of {logits.prompts} texts" if logits.prompts > 1 else ""


def top1(logits: LogitsAgreement) -> Check:
    """Informational."""
    return Check(
        name="top1",
        outcome=Outcome.PASS,
        measured=logits.top1 if logits.positions else None,
        limit=None,
        sentence=f"The most likely token is the reference's at {logits.top1:.1%} of "
        f"{logits.positions} positions (95 %: {logits.top1_low:.1%} to {logits.top1_high:.1%}).",
    )


def same_text(text: TextComparison, back: Returned) -> Check:
    stopped = back.text_stopped is not None
    if not text.tokens:
        outcome, measured = Outcome.FAIL if stopped else Outcome.INVALID, "no text"
        sentence = f"No text was generated (ended: {back.finish})."
    elif text.first_divergence is None or text.margin is None:
        outcome, measured = Outcome.PASS, "identical"
        sentence = f"All {text.tokens} generated tokens are the reference's (ended: {back.finish})."
    else:
        measured = f"token {text.first_divergence}"
        outcome = Outcome.PASS if text.near_tie else Outcome.FAIL
        kind = "a near tie" if text.near_tie else "not a near tie"
        sentence = (
            f"The text leaves the reference's at token {text.first_divergence} of {text.tokens}, "
            f"{kind}: the reference prefers its own token by {text.margin:.2g} logits, noise is "
            f"{text.noise:.2g}."
        )
    return Check(
        name="text",
        outcome=Outcome.FAIL if stopped else outcome,
        measured=measured,
        limit="identical or a near tie",
        sentence=sentence,
    )
