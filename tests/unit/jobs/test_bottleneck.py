"""What limits a board: each rule by the numbers that make it hold, and in which order they go."""

from __future__ import annotations

from typing import Any

import pytest

from harness.jobs.bottleneck import Evidence, bottleneck


def seen(**changes: Any) -> Evidence:
    """A board that reads 2 of 10 GB/s with two busy threads: 100 MB in 50 ms."""
    values: dict[str, Any] = {
        "token_ms": 50.0,
        "residual_ms": 0.5,
        "traced_ms": 50.0,
        "weight_bytes": 90_000_000,
        "kv_bytes": 10_000_000,
        "ceiling_gb_s": 10.0,
        "threads": 2,
        "cpu_busy": 0.98,
        "free_cores": 2.0,
        "largest_op": ("ffn.gate_up", 0.4),
        **changes,
    }
    return Evidence(**values)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "compute", "2 threads 98% busy, and it reads at 20% of what memory gives"),
        ({"ceiling_gb_s": 2.5}, "memory", "100 MB at 2 GB/s, 80% of the 2.5 GB/s"),
        ({"ceiling_gb_s": 2.5, "cpu_busy": 0.5}, "memory", "80%"),
        ({"ceiling_gb_s": 1.9}, "memory", "above memory's 1.9 GB/s: some of it comes"),
        ({"residual_ms": 15.0}, "dispatch", "30% of a token (15 ms) lies between"),
        ({"cpu_busy": 0.3}, "waiting", "busy for 30% of the time"),
        ({"cpu_busy": 0.3, "free_cores": 0.1}, "contended", "other processes have the cores"),
        ({"cpu_busy": 0.7}, "compute", "busy for 70%"),
        ({"ceiling_gb_s": 1.0}, "compute", "come from a cache"),
        ({"fallback": ("linear L00.ffn.down", "layout row")}, "fallback", "L00.ffn.down: layout"),
        ({"accelerators": {"npu0": 0.95}, "cpu_busy": 0.1}, "compute", "npu0 is 95% busy"),
        ({"accelerators": {"npu0": 0.02}}, "compute", "accelerator npu0 is idle (2%)"),
        ({"llc_misses": 4e6}, "compute", "misses 2.6× the bytes"),
        ({"instructions_per_cycle": 0.3}, "compute", "Only 0.30 instructions a cycle"),
        ({"instructions_per_cycle": 2.0}, "compute", "2 threads 98% busy"),
        ({"cpu_busy": None}, "waiting", "Not known"),
        ({"cpu_busy": None, "ceiling_gb_s": None}, "waiting", "nor how fast it reads memory"),
    ],
)
def test_verdict_follows_from_the_numbers(changes: Any, kind: str, words: str) -> None:
    found = bottleneck(seen(**changes))
    assert found.kind == kind, found
    assert words in found.sentence
    assert found.advice


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        # A preempted token has a long residual that is no dispatch of ours.
        ({"residual_ms": 20.0, "cpu_busy": 0.2, "free_cores": 0.0}, "contended"),
        # With much of the token between ops, its rate says nothing about memory.
        ({"residual_ms": 20.0, "ceiling_gb_s": 2.5}, "dispatch"),
        ({"fallback": ("linear a", "b"), "ceiling_gb_s": 2.5}, "fallback"),
    ],
)
def test_what_would_mislead_is_asked_first(changes: Any, kind: str) -> None:
    assert bottleneck(seen(**changes)).kind == kind


def test_keys_and_values_are_named_where_they_are_most_of_what_is_read() -> None:
    found = bottleneck(seen(ceiling_gb_s=2.5, weight_bytes=30_000_000, kv_bytes=70_000_000))
    assert "keys and values 70% of it" in found.sentence
    assert "--kv int8" in found.advice
    assert "weights" in bottleneck(seen(ceiling_gb_s=2.5)).advice


def test_an_idle_accelerator_is_where_a_busy_processor_moves_its_work() -> None:
    assert "npu0" in bottleneck(seen(accelerators={"npu0": 0.0})).advice
