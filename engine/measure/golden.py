"""A short greedy generation whose tokens must never change: the canary beside every measurement."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.measure.context import JobContext

if TYPE_CHECKING:
    from engine.decode import Decoder


def golden(decoder: Decoder, context: JobContext, when: str) -> dict[str, Any]:
    """Generate from the spec's `golden` prompt, tell it as data `golden`, and return it.

    The decoder is reset before and after.
    """
    from engine.decode import generate

    parameters = context.parameter("golden")
    prompt = [int(token) for token in parameters["prompt"]]
    decoder.reset()
    generation = generate(decoder, prompt, max_new=int(parameters["count"]))
    tokens = [int(event.token) for event in generation]
    tpot_s = generation.result.tpot_s
    decoder.reset()
    told = {
        "when": when,
        "attempt": context.attempt,
        "at_s": context.elapsed_s,
        "tokens": tokens,
        "hash": hash_of(tokens),
        "tokens_per_s": 1 / tpot_s if tpot_s else 1.0,
    }
    context.data("golden", told)
    return told


def hash_of(tokens: Sequence[int]) -> str:
    """The first 16 hex digits of the SHA-256 over the ids."""
    return hashlib.sha256(" ".join(str(token) for token in tokens).encode()).hexdigest()[:16]
