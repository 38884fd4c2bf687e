"""`harness profile` on a virtual board: the table adds up, and the trace is for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_a_board_is_planned_for_profiled_and_its_trace_written(lab: Any, model_file: Path) -> None:
    lab.boards("  v: {virtual: {}}")
    code, plan = lab.command("plan", "--board", "v", "--model", str(model_file), "--json").finish()
    assert code == 0 and plan["memory"]["memory"] > 0
    assert plan["memory"]["source"] == "told just now"  # nobody has used the board before
    assert plan["bandwidth"]["gb_s"] is None

    code, told = lab.command(
        "profile", "--model", str(model_file), "--depth", "96", "--seconds", "2",
        "--trace", "trace.json", "--json",
    ).finish()  # fmt: skip
    row = told["boards"]["v"]["profile"]
    assert (code, row["outcome"]) in ((0, "pass"), (0, "warn")), row
    found = told["details"]["v"]

    shallow, deep = found["depths"]
    assert shallow["position"] < deep["position"] < 96
    times = sum(op["deep_us"] for op in found["ops"]) / 1e3
    whole = times - deep["overlap_ms"] + deep["residual_ms"]
    assert whole == pytest.approx(deep["traced_ms"])
    assert sum(group["deep_us"] for group in found["groups"]) / 1e3 == pytest.approx(times)
    assert len(row["headline"]) > 20  # the sentence as far as a line goes
    assert found["sentence"].startswith(row["headline"].removesuffix(" …"))
    assert found["bandwidth_gb_s"] > 0
    assert found["kernels"].split()[0] in ("native", "packed")
    names = {name for name, _ in found["counters_missing"]} | set(deep["counters"])
    assert {"cycles", "instructions", "llc_misses"} <= names  # counted, or a reason

    code, plan = lab.command("plan", "--board", "v", "--model", str(model_file), "--json").finish()
    assert code == 0 and plan["memory"]["source"] == "told when it was last used"
    assert plan["bandwidth"]["gb_s"] == found["bandwidth_gb_s"]
    assert "profile run" in plan["bandwidth"]["source"]

    trace = json.loads((lab.folder / "trace.json").read_text())
    ops = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {op["op"] for op in found["ops"]} <= ops
    assert lab.spools() == []
