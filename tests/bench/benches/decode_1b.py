"""Decode of the shape of a billion parameters, where nothing but bandwidth binds."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..decoding import against_llama
from ..results import Row, Target

SUMMARY = "1B decode against llama.cpp and against the bandwidth: Q4_0, Q4_K_M, Q8_0"
TARGETS = {
    "1b-q4_0": Target(1.6, aim=1.9),
    "1b-q4_k_m": Target(1.5),
    "1b-q8_0": Target(1.4),
}
TOKENS = 12


def run(bench: Bench) -> Iterator[Row]:
    for name, target in TARGETS.items():
        yield from against_llama(bench, name, {0: target}, count=TOKENS, judge_shares=True)
