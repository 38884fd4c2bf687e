"""Decode of the demonstration model's weights in three quantisations, at three depths."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import Bench
from ..decoding import against_llama
from ..results import Row, Target

SUMMARY = "135M decode against llama.cpp at depth 0, 2048 and 7168: Q4_1, Q4_0, Q8_0"
TARGETS = {0: Target(2.0, aim=2.6), 2048: Target(2.5), 7168: Target(3.0)}
TOKENS = 32


def run(bench: Bench) -> Iterator[Row]:
    for name in ("135m-q4_1", "135m-q4_0", "135m-q8_0"):
        yield from against_llama(bench, name, TARGETS, count=TOKENS, judge_shares=False)
