"""A generation that somebody asked for: the board's part of a test of one's own.

Cases come with the spec: `{"prompt": [ids], "later": [[ids], …], "max_new", "sampling": {…},
"stop_ids": [ids]}`. `later` are further turns on the cache that the turn before left. Each case is
told as `data` under "case": its turns, with tokens, how they ended, and when they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.measure.context import JobContext

if TYPE_CHECKING:
    from engine.decode import Decoder


def run(context: JobContext) -> None:
    cases = context.parameter("cases")
    decoder = context.decoder(context=int(context.parameter("context")))
    try:
        for number, case in enumerate(cases):
            context.data("case", run_case(decoder, case))
            context.progress(number + 1, len(cases), "generations")
    finally:
        decoder.close()


def run_case(decoder: Decoder, case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each turn's tokens, finish reason and times. Times are seconds after the turn began."""
    from engine.decode import generate
    from engine.sampling import Sampling

    decoder.reset()
    turns = []
    pending: list[int] = []  # the newest token is not in the cache yet
    for prompt in [case["prompt"], *case.get("later", ())]:
        generation = generate(
            decoder,
            [*pending, *prompt],
            sampling=Sampling(**case.get("sampling", {})),
            max_new=int(case["max_new"]),
            stop_ids=case.get("stop_ids", ()),
        )
        tokens = [int(event.token) for event in generation]
        result = generation.result
        pending = tokens[-1:]
        times_s = [(t_ns - result.started_ns) / 1e9 for t_ns in result.t_ns]
        turns.append(
            {
                "tokens": tokens,
                "finish": result.finish,
                "cached": decoder.position,
                "times_s": times_s,
            }
        )
    return turns
