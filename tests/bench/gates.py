"""The golden-token check that every speed needs: predictions against the float reference.

Two kinds of gate. A contestant that rounds (activations or cache to 8 bits and less) must predict
like the reference within limits that a working engine keeps easily and a broken one never: the
same best token wherever the reference clearly prefers one, nearly, and a small divergence. A
contestant that computes in float throughout must choose every clear best token, with a divergence
of rounding errors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .predictions import Reference, divergence, reference_of
from .results import Check


@dataclasses.dataclass(frozen=True)
class Gate:
    agreement: float  # share of clear best tokens, at least
    nats: float  # mean divergence, at most


EXACT = Gate(1.0, 1e-4)
HALF = Gate(0.98, 2e-3)  # a cache or weights in 16 bits, everything else in float
ROUNDED = Gate(0.95, 0.03)  # activations or cache in 8 bits
COARSE = Gate(0.85, 0.3)  # a cache in 4 bits
NEAR_TIE = 1e-3  # nats; two float32 engines differ by less in any logit


class Checked(Protocol):
    """A contestant that can be asked for its predictions after each of some tokens."""

    name: str
    gate: Gate

    def predictions(
        self, tokens: Sequence[int], ids: Sequence[Sequence[int]], mode: str
    ) -> dict[str, Any]: ...


def compare(name: str, gate: Gate, reference: Reference, told: dict[str, Any]) -> Check:
    """Judge one contestant's answer. Numbers that are none fail whatever else agrees."""
    best = np.asarray(told["best"], np.int64)
    logp = np.asarray(told["logp"], np.float64)
    clear = reference.clear
    decided = int(clear.sum())
    if not np.isfinite(logp).all():
        return Check(name, len(best), decided, 0.0, float("inf"), "its logits are not numbers")
    same = (best == reference.ids[:, 0])[clear]
    agreement = float(same.mean()) if decided else 1.0
    nats = float(divergence(reference, logp).mean())
    failure = ""
    if agreement < gate.agreement:
        failure = f"golden tokens differ: expected at least {gate.agreement:.0%} of them"
    elif nats > gate.nats:
        failure = f"predictions differ: expected at most {gate.nats:g} nats"
    return Check(name, len(best), decided, agreement, nats, failure)


def reference_at(
    package: Path, identity: str, tokens: Sequence[int], depth: int, count: int, cache: Path
) -> Reference:
    """What the numpy engine in float32 predicts after each of tokens[depth : depth + count], with
    all tokens before them cached. Kept in `cache` under `identity` (model and engine) and tokens:
    a deep reference takes minutes."""
    fed = [int(token) for token in tokens[: depth + count]]
    key = json.dumps([identity, fed, depth, count])
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
    if path.is_file():
        with np.load(path, allow_pickle=False) as file:
            return Reference(file["ids"], file["logp"])
    from engine.decode import Decoder
    from engine.package import Package

    with Package.open(package) as opened:
        decoder = Decoder(opened, unit="packed", context=depth + count)
        if depth:
            decoder.advance(np.asarray(fed[:depth]))
        found = reference_of(decoder.advance(np.asarray(fed[depth:]), all_logits=True))
    partial = path.with_name(f".{path.name}.partial.npz")
    np.savez(partial, ids=found.ids, logp=found.logp)
    partial.replace(path)
    return found


def greedy_at(
    package: Path, identity: str, prompt: Sequence[int], count: int, cache: Path
) -> tuple[list[int], list[float]]:
    """The tokens that the numpy engine in float32 chooses after `prompt`, and by how many nats each
    leads the second best. Kept in `cache`."""
    key = json.dumps([identity, [int(token) for token in prompt], count, "greedy"])
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if path.is_file():
        kept = json.loads(path.read_text("utf-8"))
        return kept["tokens"], kept["leads"]
    from engine.decode import Decoder
    from engine.package import Package

    tokens: list[int] = []
    leads: list[float] = []
    with Package.open(package) as opened:
        decoder = Decoder(opened, unit="packed", context=len(prompt) + count)
        logits = decoder.advance(np.asarray(prompt))
        for _ in range(count):
            second, first = np.sort(logits)[-2:].tolist()
            tokens.append(int(np.argmax(logits)))
            leads.append(first - second)
            logits = decoder.advance(np.array(tokens[-1:]))
    path.write_text(json.dumps({"tokens": tokens, "leads": leads}), "utf-8")
    return tokens, leads


def same_text(
    check: Check, expected: Sequence[int], leads: Sequence[float], found: Sequence[int]
) -> Check:
    """`check`, failed when the greedy texts part before a near tie: then either token is right, and
    what follows says nothing."""
    for index, (wanted, lead, token) in enumerate(zip(expected, leads, found, strict=True)):
        if token != wanted:
            if lead < NEAR_TIE:
                return check
            failure = f"greedy token {index} is {token}, expected {wanted}"
            return dataclasses.replace(check, failure=check.failure or failure)
    return check
