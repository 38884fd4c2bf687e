"""Stage 1, tiny: a two-layer model and short prompts. Is the flow right, is memory stable?

The reference runs the same cases on the host; every token must be equal. Logits of the tiny model
are spread far apart, so float differences do not decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.measure.tiny import CANCEL_AFTER, run_case
from engine.package import Package
from harness.jobs import failures, prompts, references
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.details import TinyDetails
from harness.jobs.memory import Extent
from harness.jobs.pace import START_S
from harness.verdicts import Check, Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

ROUNDS = 24
WARM_UP_ROUNDS = 4  # the allocator's first growth is no leak
GROWTH_MB = 1.0  # over the rounds: some 40 kB a round, less than one activation buffer a token
CONTEXT = 192
NEW_TOKENS = 24


class TinyStage:
    """See the module."""

    name = "tiny"
    order = 1
    needs_model = False
    timed = False

    def extent(self, context: StageContext) -> Extent:
        return Extent(tiny_context(context))

    def plan(self, context: StageContext) -> Plan:
        size = tiny_context(context)
        parameters: dict[str, object] = {
            "cases": cases(context, size), "rounds": ROUNDS, "context": size,
        }  # fmt: skip
        spec = make_spec(context, "tiny", parameters, deadline_s=300.0, stall_s=START_S)
        return Plan(spec, None, seconds_hint=15.0)

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        size = tiny_context(context)
        asked = cases(context, size)
        expected = reference_cases(context, asked, size)
        found = log.all_data("case")
        mismatch, compared = first_mismatch(asked, found, expected)
        rounds = log.data("rounds")
        checks = (
            same_tokens_check(mismatch, compared, len(asked)),
            _context_limit(found, size),
            _cancel(log.data("cancelled")),
            _refusal(log.data("refused")),
            repeats_check(rounds["changed"], ROUNDS),
            _memory(rounds["rss_mb"]),
        )
        tpot_s = next((case["tpot_s"] for case in found if case.get("tpot_s")), None)
        details = TinyDetails(
            prompts=len(asked),
            tokens_compared=compared,
            first_mismatch=mismatch,
            rss_first_mb=rounds["rss_mb"][0],
            rss_last_mb=rounds["rss_mb"][-1],
            tokens_per_s=1 / tpot_s if tpot_s else 0.0,
        )
        outcome = worst([check.outcome for check in checks])
        bad = next((check for check in checks if check.outcome == outcome), checks[0])
        good = f"{compared} tokens of {len(asked)} prompts equal the reference; memory stable"
        return Verdict(
            outcome=outcome,
            headline=one_line(good if outcome == Outcome.PASS else bad.sentence),
            checks=checks,
            remedy=REMEDIES.get(bad.name) if outcome == Outcome.FAIL else None,
            details=details.model_dump(mode="json"),
        )


REMEDIES: Mapping[str, str] = {
    "tokens_equal": "run the accuracy stage's alignment on the tiny model: it names the op",
    "stops_at_context": "look at the end of a generation in engine/decode.py",
    "cancels": "look at how a generation is cancelled and its cache left behind",
    "refuses_long_prompt": "a prompt longer than the context must raise ContextFull before a write",
    "repeats": "same input, other tokens: look for state that a reset leaves, or for a race",
    "memory_stable": "look for what each generation keeps: taps, traces, cached arrays",
}


def tiny_context(context: StageContext) -> int:
    return min(CONTEXT, context.model.hyperparameters.context)


def cases(context: StageContext, size: int) -> list[dict[str, Any]]:
    """What is generated: prompts of one token, of a few, one that fills the context of `size`."""
    model, seed = context.model, context.options.seed
    text = [int(token) for token in prompts.text_tokens(model, size, seed)]
    short, other = text[:12], text[20:29]
    return [
        {"name": "greedy", "prompt": short, "max_new": NEW_TOKENS, "sampling": {}},
        {"name": "one token", "prompt": text[3:4], "max_new": NEW_TOKENS, "sampling": {}},
        {
            "name": "sampled",
            "prompt": short,
            "max_new": NEW_TOKENS,
            "sampling": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": seed},
        },
        {
            "name": "sampled with penalty",
            "prompt": other,
            "max_new": NEW_TOKENS,
            "sampling": {
                "temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "seed": seed + 1,
            },
        },
        {"name": "two turns", "prompt": short, "later": [other], "max_new": 8, "sampling": {}},
        {"name": "full context", "prompt": text[: size - 10], "max_new": 400, "sampling": {}},
    ]  # fmt: skip


def reference_cases(
    context: StageContext, asked: Sequence[Mapping[str, Any]], size: int
) -> list[dict[str, Any]]:
    """The same cases on the host's reference unit."""
    definition = references.definition_of(context.engine.options)

    def make() -> references.Arrays:
        with Package.open(context.model.package) as package:
            decoder = references.decoder_of(package, definition, size)
            outcomes = [run_case(decoder, case) for case in asked]
        text = json.dumps([{**outcome, "tpot_s": None} for outcome in outcomes])
        return {"json": np.frombuffer(text.encode(), np.uint8)}

    key = [context.model.sha256, definition.to_mapping(), size, json.dumps(asked, sort_keys=True)]
    arrays = references.cached("tiny", key, make)
    outcomes: list[dict[str, Any]] = json.loads(arrays["json"].tobytes())
    return outcomes


def first_mismatch(
    asked: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
) -> tuple[str | None, int]:
    """("prompt 2 (one token), token 5: board 17, reference 99" or None, tokens compared)."""
    compared = 0
    by_name = {case["name"]: case for case in found}
    for number, (case, want) in enumerate(zip(asked, expected, strict=True), start=1):
        where = f"prompt {number} ({case['name']})"
        got = by_name.get(case["name"])
        if got is None:
            return f"{where}: the board told nothing", compared
        for turn, (board, reference) in enumerate(
            zip(got["turns"], want["turns"], strict=False), start=1
        ):
            at = where if len(want["turns"]) == 1 else f"{where}, turn {turn}"
            pairs = zip(board["tokens"], reference["tokens"], strict=False)
            for index, (ours, theirs) in enumerate(pairs):
                if ours != theirs:
                    return f"{at}, token {index}: board {ours}, reference {theirs}", compared
                compared += 1
            for what in ("finish", "cached"):
                if board[what] != reference[what]:
                    return (
                        f"{at}: {what} is {board[what]!r} on the board, {reference[what]!r} "
                        "on the reference",
                        compared,
                    )
            if len(board["tokens"]) != len(reference["tokens"]):
                return (
                    f"{at}: {len(board['tokens'])} tokens on the board, "
                    f"{len(reference['tokens'])} on the reference",
                    compared,
                )
        if len(got["turns"]) != len(want["turns"]):
            return f"{where}: {len(got['turns'])} turns, expected {len(want['turns'])}", compared
    return None, compared


def same_tokens_check(mismatch: str | None, compared: int, count: int) -> Check:
    """`mismatch` and `compared` of `first_mismatch`; `count` prompts."""
    return Check(
        name="tokens_equal",
        outcome=Outcome.FAIL if mismatch else Outcome.PASS,
        measured=mismatch or compared,
        limit="token for token",
        unit="" if mismatch else "tokens",
        sentence=f"Tokens differ from the reference: {mismatch}."
        if mismatch
        else f"All {compared} tokens of {count} prompts equal the reference.",
    )


def _context_limit(found: Sequence[Mapping[str, Any]], size: int) -> Check:
    full = next((case for case in found if case["name"] == "full context"), None)
    last = full["turns"][-1] if full and full["turns"] else {"finish": "nothing", "cached": 0}
    good = last["finish"] == "length" and last["cached"] == size
    return Check(
        name="stops_at_context",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=str(last["finish"]),
        limit="length",
        sentence=f"A generation into the context limit of {size} ended as {last['finish']!r} with "
        f"{last['cached']} positions cached.",
    )


def _cancel(told: Mapping[str, Any]) -> Check:
    tokens, afterwards = told["tokens"], told["afterwards"]
    good = (
        told["finish"] == "cancelled"
        and len(tokens) == CANCEL_AFTER
        and tokens == afterwards[:CANCEL_AFTER]
    )
    return Check(
        name="cancels",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=str(told["finish"]),
        limit="cancelled",
        sentence=f"A generation cancelled after {CANCEL_AFTER} tokens ended as {told['finish']!r} "
        f"with {len(tokens)}; the next one began "
        + ("as it should." if tokens == afterwards[: len(tokens)] else "with other tokens."),
    )


def _refusal(told: Mapping[str, Any]) -> Check:
    good = told["refused"] and told["cached"] == 0
    return Check(
        name="refuses_long_prompt",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured="refused" if told["refused"] else "taken",
        limit="refused",
        sentence=f"A prompt longer than the context: {told['message']}.",
    )


def repeats_check(changed: str | None, rounds: int) -> Check:
    """`changed`: where a round differed from the first, None where none did."""
    return Check(
        name="repeats",
        outcome=Outcome.FAIL if changed else Outcome.PASS,
        measured=changed or "same tokens",
        limit="same tokens",
        sentence=f"Not repeatable: {changed}." if changed else f"{rounds} rounds, the same tokens.",
    )


def _memory(rss_mb: Sequence[float]) -> Check:
    """Median of the last rounds against that of the first ones after warming up."""
    part = max(1, (len(rss_mb) - WARM_UP_ROUNDS) // 3)
    early = float(np.median(rss_mb[WARM_UP_ROUNDS : WARM_UP_ROUNDS + part]))
    growth = float(np.median(rss_mb[-part:])) - early
    good = growth <= GROWTH_MB
    return Check(
        name="memory_stable",
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=growth,
        limit=GROWTH_MB,
        unit="MiB",
        sentence=f"Resident memory {'stayed' if good else 'grew'}: {growth:+.2f} MiB over "
        f"{len(rss_mb)} rounds (limit {GROWTH_MB:g}).",
    )


STAGE = TinyStage()
