"""The table of a profile adds up, whatever overlaps and whatever lies between ops."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from harness.jobs.chrome_trace import chrome_trace
from harness.jobs.op_times import bytes_read, group_of, timeline, times_of

MS = 1_000_000
PROGRAM = {
    "ops": [
        {"id": "L00.attn.mix", "kinds": ["attention"], "part": "vector", "bytes": 0, "attends": 1},
        {"id": "L00.ffn.down", "kinds": ["linear", "add"], "part": "matrix", "bytes": 4000,
         "attends": 0},
    ],
    "kv_bytes": 10.0,
}  # fmt: skip


def recorded(
    tokens: list[tuple[int, int, int, int]], ops: list[tuple[int, int, int, int]]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tokens (depth, traced, step, ms) one after the other from 100 ms on, ops (step, index, start,
    end) in ms after their token's start."""
    start = 100 * MS
    rows, starts = [], {}
    for depth, traced, step, spent in tokens:
        rows.append((depth, traced, 50 + depth, step, start, spent * MS))
        starts[step] = start
        start += (spent + 1) * MS
    names = ("depth", "traced", "position", "step", "start_ns", "duration_ns")
    table = np.array(rows, np.int64)
    trace = [(step, op, starts[step] + a * MS, starts[step] + b * MS) for step, op, a, b in ops]
    return {n: table[:, i] for i, n in enumerate(names)}, np.array(trace, np.int64).reshape(-1, 4)


def test_ops_less_overlap_and_the_rest_add_up_to_the_token() -> None:
    tokens, trace = recorded(
        [(0, 0, 0, 9), (0, 1, 1, 10), (0, 1, 2, 10)],
        # side by side from 3 to 5; the second token's ops lie one behind the other
        [(1, 0, 1, 5), (1, 1, 3, 8), (2, 0, 0, 4), (2, 1, 4, 9)],
    )
    found = times_of(tokens, timeline(tokens, trace), 0, 2)
    assert (found.plain, found.traced, found.tokens) == (9.0, 10.0, 2)
    assert found.ops.tolist() == [4.0, 5.0]
    assert found.overlap == pytest.approx(1.0)
    assert found.residual == pytest.approx(2.0)
    assert found.ops.sum() - found.overlap + found.residual == pytest.approx(found.traced)


def test_commands_of_one_op_are_summed() -> None:
    tokens, trace = recorded([(0, 0, 0, 5), (0, 1, 1, 5)], [(1, 0, 0, 1), (1, 0, 2, 4)])
    assert times_of(tokens, timeline(tokens, trace), 0, 2).ops.tolist() == [3.0, 0.0]


def test_the_slowest_and_the_fastest_tokens_are_left_out() -> None:
    spent = [10] * 18 + [900, 1]
    tokens, trace = recorded(
        [(1, 0, 0, 10), *((1, 1, 1 + step, ms) for step, ms in enumerate(spent))],
        [(1 + step, 0, 0, 1) for step in range(20)],
    )
    found = times_of(tokens, timeline(tokens, trace), 1, 2)
    assert (found.traced, found.tokens) == (10.0, 16)


def test_ops_of_a_step_that_was_not_timed_are_refused() -> None:
    tokens, trace = recorded([(0, 1, 1, 5)], [(1, 0, 0, 1)])
    trace[0, 0] = 7
    with pytest.raises(ValueError, match="not timed"):
        timeline(tokens, trace)


@pytest.mark.parametrize("row", [(1, -1, 0, 5), (1, 0, 5, 4), (1, 2, 0, 5)])
def test_ops_that_cannot_be_are_refused(row: tuple[int, int, int, int]) -> None:
    tokens, trace = recorded([(0, 0, 0, 5), (0, 1, 1, 5)], [row])
    with pytest.raises(ValueError, match="the trace has"):
        times_of(tokens, timeline(tokens, trace), 0, 2)


def test_the_same_op_of_all_layers_has_one_name() -> None:
    assert [group_of(name) for name in ("L07.attn.qkv", "L123.attn.qkv", "head.logits")] == [
        "attn.qkv",
        "attn.qkv",
        "head.logits",
    ]


def test_attention_reads_the_cached_positions_and_its_own() -> None:
    assert [bytes_read(op, 10.0, 99) for op in PROGRAM["ops"]] == [1000, 4000]


def test_the_trace_keeps_to_the_documented_format() -> None:
    tokens, trace = recorded(
        [(0, 1, 1, 10), (1, 1, 2, 10)], [(1, 0, 1, 5), (1, 1, 5, 8), (2, 0, 0, 4), (2, 1, 4, 9)]
    )
    document = json.loads(
        json.dumps(chrome_trace("board: model", PROGRAM, timeline(tokens, trace), {"run": "r"}))
    )
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["name"], str) and isinstance(event["ts"], (int, float))
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert isinstance(event["cat"], str) and isinstance(event["args"], dict)
        else:
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["matrix", "tokens", "vector"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [e["name"] for e in spans if names[e["tid"]] == "matrix"] == ["L00.ffn.down"] * 2
    # Complete events of one track must not cross: each begins behind the one before.
    for track in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == track)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    down = next(event for event in spans if event["name"] == "L00.ffn.down")
    assert (down["ts"], down["dur"]) == (5000.0, 3000.0)  # microseconds from the first token
    assert down["args"] == {"kinds": "linear+add", "bytes": 4000, "GB/s": 0.001}
