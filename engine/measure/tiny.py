"""The tiny stage, the board's part: short generations on a small model, again and again.

Cases come with the spec, as plain ids, so that the host can run the very same ones on the
reference: `{"name", "prompt": [ids], "later": [[ids], …], "max_new", "sampling": {…}}`. `later` are
further turns on the cache that the turn before left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.measure.context import JobContext

if TYPE_CHECKING:
    from engine.decode import Decoder

CANCEL_AFTER = 3  # tokens


def run(context: JobContext) -> None:
    import psutil

    cases = context.parameter("cases")
    rounds = int(context.parameter("rounds"))
    decoder = context.decoder(context=int(context.parameter("context")))
    process = psutil.Process()
    first: list[dict[str, Any]] = []
    rss_mb: list[float] = []
    changed = None
    for number in range(rounds):
        outcomes = [run_case(decoder, case) for case in cases]
        if number == 0:
            first = outcomes
            for outcome in outcomes:
                context.data("case", outcome)
        elif changed is None:
            changed = difference(first, outcomes, number)
        rss_mb.append(process.memory_info().rss / 2**20)
        context.progress(number + 1, rounds, "rounds of short prompts")
    context.data("rounds", {"rss_mb": rss_mb, "changed": changed})
    context.data("cancelled", cancelled(decoder, cases[0]))
    context.data("refused", refused(decoder))


def run_case(decoder: Decoder, case: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens and finish reason of each turn. Raises NonFinite for bad numbers."""
    from engine.decode import generate
    from engine.sampling import Sampling

    decoder.reset()
    turns = []
    tpot_s = None
    pending: list[int] = []  # the newest token is not in the cache yet
    for prompt in [case["prompt"], *case.get("later", ())]:
        generation = generate(
            decoder,
            [*pending, *prompt],
            sampling=Sampling(**case.get("sampling", {})),
            max_new=int(case["max_new"]),
        )
        tokens = [int(event.token) for event in generation]
        result = generation.result
        pending = tokens[-1:]
        tpot_s = result.tpot_s or tpot_s
        turns.append({"tokens": tokens, "finish": result.finish, "cached": decoder.position})
    return {"name": case["name"], "turns": turns, "tpot_s": tpot_s}


def difference(first: list[dict[str, Any]], again: list[dict[str, Any]], number: int) -> str | None:
    """Where a later round differs from the first, or None."""
    for before, after in zip(first, again):
        if before["turns"] != after["turns"]:
            return f"case {before['name']!r} gave other tokens in round {number + 1}"
    return None


def cancelled(decoder: Decoder, case: Mapping[str, Any]) -> dict[str, Any]:
    """A generation cancelled after a few tokens, and the same one afterwards to its end."""
    from engine.decode import generate

    decoder.reset()
    tokens: list[int] = []
    generation = generate(
        decoder,
        case["prompt"],
        max_new=int(case["max_new"]),
        cancel=lambda: len(tokens) >= CANCEL_AFTER,
    )
    for event in generation:
        tokens.append(int(event.token))
    afterwards = run_case(decoder, case)
    return {
        "finish": generation.result.finish,
        "tokens": tokens,
        "afterwards": afterwards["turns"][0]["tokens"],
    }


def refused(decoder: Decoder) -> dict[str, Any]:
    """What happens to a prompt that is one token longer than the context."""
    from engine.decode import ContextFull, generate

    decoder.reset()
    try:
        for _ in generate(decoder, [0] * (decoder.context + 1), max_new=1):
            break
    except ContextFull as error:
        return {"refused": True, "message": str(error), "cached": decoder.position}
    return {"refused": False, "message": "the prompt was taken", "cached": decoder.position}
