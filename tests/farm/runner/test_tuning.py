"""What a board runs best with is measured once, before its first timed stage, and then known."""

from __future__ import annotations

from typing import Any

import pytest

OPEN = "  v: {virtual: {}, threads: auto, pin: auto}"


def stages_of(lab: Any, result: Any) -> list[str]:
    return [row.stage for row in lab.store.campaign_runs(result.id, "v")]


def test_a_ladder_is_measured_once_and_used_by_the_timed_stages(lab: Any) -> None:
    first = lab.run(lab.boards(OPEN), stages=["accuracy", "curve", "stress"])
    if first.results["v"]["curve"].outcome.value == "error":
        pytest.fail("\n".join(first.results["v"]["curve"].explain()))
    rows = lab.store.campaign_runs(first.id, "v")
    if not any(row.stage == "ladder" for row in rows):
        native = rows[0].engine or {}
        pytest.skip(f"needs a compiler for native code: the board ran {native.get('unit')}")
    assert [row.stage for row in rows] == ["accuracy", "ladder", "curve", "stress"]
    ladder, curve = rows[1], rows[2]
    assert ladder.outcome == "pass"
    assert curve.engine["threads"] == ladder.details["threads"]
    assert curve.engine["engine"]["kv_layout"] == ladder.details["kv_layout"]
    assert set(first.results["v"]) == {"accuracy", "curve", "stress"}  # it is no stage

    again = lab.run(lab.boards(OPEN), stages=["curve"])
    assert stages_of(lab, again) == ["curve"]
    other = lab.run(
        lab.boards("  v: {virtual: {}, threads: auto, pin: auto, engine: {kv: f32}}"),
        stages=["curve"],
    )
    assert stages_of(lab, other) == ["ladder", "curve"]


def test_nothing_is_measured_where_the_file_says_threads_and_cores(lab: Any) -> None:
    result = lab.run(lab.boards("  v: {virtual: {}, threads: 1, pin: none}"), stages=["curve"])
    assert stages_of(lab, result) == ["curve"]
    (row,) = lab.store.campaign_runs(result.id, "v")
    assert row.engine["threads"] == 1


def test_without_a_compiler_numpy_runs_and_every_speed_says_why(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.native.compilers import BuildError
    from harness.deploy import bundle

    def unavailable(*given: Any, **more: Any) -> Any:
        raise BuildError("no compiler", expected="zig")

    monkeypatch.setattr(bundle, "native_build", unavailable)
    result = lab.run(lab.boards(OPEN), stages=["curve"])
    assert stages_of(lab, result) == ["curve"]  # numpy has one thread: nothing to find
    curve = result.results["v"]["curve"]
    (kernels,) = [check for check in curve.verdict.checks if check.name == "kernels"]
    assert (curve.outcome.value, kernels.outcome.value) == ("warn", "warn")
    assert "no compiler" in kernels.sentence

    asked = lab.run(lab.boards("  v: {virtual: {}, engine: {unit: native}}"), stages=["curve"])
    refused = asked.results["v"]["curve"]
    assert (refused.outcome.value, refused.error_kind) == ("error", "deploy")
    assert "--unit packed" in str(refused.verdict.remedy)
