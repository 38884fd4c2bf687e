"""A profile's details, from what a board told: they add up, and the verdict follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.jobs.chrome_trace import typical_trace
from harness.jobs.profile import details_of


def details(sample: Any, **how: Any) -> Any:
    return details_of(sample.told(3, **how), "valid")


def test_groups_hold_every_op_once_and_the_residual_is_the_rest(sample: Any) -> None:
    found = details(sample)
    assert [op.op for op in found.groups][:2] == ["ffn.gate_up", "head.logits"]
    assert sum(op.calls for op in found.groups) == len(found.ops) == 152
    assert sum(op.bytes for op in found.groups) == sum(op.bytes for op in found.ops)
    for depth, times in zip(found.depths, ("shallow_us", "deep_us"), strict=True):
        total = sum(getattr(op, times) for op in found.groups) / 1e3
        assert total == pytest.approx(depth.ops_ms)
        assert depth.ops_ms - depth.overlap_ms + depth.residual_ms == pytest.approx(depth.traced_ms)
    shares = sum(op.share for op in found.groups)
    deep = found.depths[-1]
    assert shares + deep.residual_ms / deep.traced_ms == pytest.approx(1.0)


def test_rates_are_of_the_bytes_that_an_op_reads(sample: Any) -> None:
    found = details(sample, rate=9.0, ceiling=12.0)
    head = next(op for op in found.groups if op.op == "head.logits")
    assert head.gb_s == pytest.approx(9.0, rel=0.04)
    assert head.of_ceiling == pytest.approx(head.gb_s / 12.0)
    mix = next(op for op in found.groups if op.op == "attn.mix")
    assert mix.bytes == pytest.approx(30 * 384 * (found.depths[-1].position + 1), rel=0.01)
    assert mix.deep_us > mix.shallow_us


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({}, "memory"),
        ({"ceiling": 30.0}, "compute"),
        ({"gap_us": 40.0}, "dispatch"),
        ({"ceiling": 30.0, "cpu_busy": 0.4}, "waiting"),
        (
            {"kernels": {"linear": "neon, slow for L00.ffn.down: layout row, not interleaved"}},
            "fallback",
        ),
    ],
)
def test_what_limits_the_board_follows_from_what_it_told(
    how: dict[str, Any], kind: str, sample: Any
) -> None:
    assert details(sample, **how).bottleneck == kind


def test_counts_are_of_one_token(sample: Any) -> None:
    deep = details(sample).depths[-1]
    assert (deep.minor_faults, deep.voluntary_switches) == (0.1, 1.2)
    assert deep.counters["instructions"] == 3.1e7


def test_the_stored_token_makes_a_trace_with_the_bytes_of_its_depth(sample: Any) -> None:
    found = details(sample)
    events = typical_trace("board", found)["traceEvents"]
    tokens = [event for event in events if event.get("cat") == "token"]
    assert [event["args"]["position"] for event in tokens] == [d.position for d in found.depths]
    mixes = [event["args"]["bytes"] for event in events if event["name"] == "L07.attn.mix"]
    assert mixes == [round(384 * (depth.position + 1)) for depth in found.depths]
    ends = [event["ts"] + event["dur"] for event in tokens]
    assert ends[0] < tokens[1]["ts"]
