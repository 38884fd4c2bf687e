"""The four jobs of the engine, in this process and as `engine work` with a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode import Decoder
from engine.measure import alignment, curve, stress, tiny
from engine.measure.context import JobContext, JobError, plain
from engine.measure.golden import hash_of
from engine.measure.worker import describe, run_started_ns
from engine.package import Package
from engine.records import RunSpec
from engine.runtime.sync import NonFinite
from engine.runtime.trace import Taps

GOLDEN = {"prompt": [1, 5, 9], "count": 6}
Start = Callable[..., tuple[JobContext, list[tuple[str, Mapping[str, Any]]]]]


@pytest.fixture
def start(synthetic_package: Path, tmp_path: Path) -> Start:
    """`start(parameters, inputs)`: a context on a temporary spool, and the events it will get."""

    def make(
        parameters: dict[str, Any], inputs: dict[str, Any] | None = None, **spec: Any
    ) -> tuple[JobContext, list[tuple[str, Mapping[str, Any]]]]:
        path = None
        if inputs is not None:
            path = tmp_path / "inputs.npz"
            np.savez(path, **inputs)
        events: list[tuple[str, Mapping[str, Any]]] = []
        (tmp_path / "spool").mkdir(exist_ok=True)
        context = JobContext(
            RunSpec(
                run_id="r",
                job="test",
                package=str(synthetic_package),
                package_sha256=None,
                parameters=parameters,
                inputs=None if path is None else str(path),
                options={"unit": "packed"},
                **spec,
            ),
            Package.open(synthetic_package),
            tmp_path / "spool",
            0,
            time.monotonic_ns(),
            lambda kind, data: events.append((kind, data)),
        )
        return context, events

    return make


def found(events: list[tuple[str, Mapping[str, Any]]], name: str) -> list[Any]:
    return [data["value"] for kind, data in events if kind == "data" and data["name"] == name]


def arrays(context: JobContext, name: str) -> dict[str, Any]:
    with np.load(context.spool / "arrays" / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def test_tiny_tells_cases_rounds_and_edges(start: Start) -> None:
    cases = [
        {"name": "a", "prompt": [3, 4, 5], "max_new": 6},
        {"name": "turns", "prompt": [3], "later": [[7, 8]], "max_new": 4},
        {"name": "full", "prompt": list(range(60)), "max_new": 400},
    ]
    context, events = start({"cases": cases, "rounds": 3, "context": 64})
    tiny.run(context)
    by_name = {case["name"]: case for case in found(events, "case")}
    assert [turn["finish"] for turn in by_name["full"]["turns"]] == ["length"]
    assert by_name["full"]["turns"][0]["cached"] == 64
    # Turn 2 begins with the newest token of turn 1, which no step had read yet.
    assert [turn["cached"] for turn in by_name["turns"]["turns"]] == [4, 10]
    assert found(events, "rounds")[0]["changed"] is None
    assert len(found(events, "rounds")[0]["rss_mb"]) == 3
    cancelled = found(events, "cancelled")[0]
    assert cancelled["finish"] == "cancelled"
    assert cancelled["tokens"] == by_name["a"]["turns"][0]["tokens"][:3]
    assert found(events, "refused")[0]["refused"]


def reference_inputs(package: Package, tokens: Any, rows: Any) -> dict[str, Any]:
    """What the host sends, from a float64 run of the reference unit."""
    decoder = Decoder(package, unit="reference", context=len(tokens), dtype=np.float64)
    taps = Taps(None)
    decoder.advance(tokens, taps=taps, all_logits=True)
    inputs: dict[str, Any] = {"tokens": tokens, "rows": rows, "prompt": np.array([1, 2, 3])}
    for name in taps.values:
        if name in decoder.program.caches:
            inputs[f"cache.{name}"] = taps.stacked(name).astype(np.float32)
        else:
            inputs[f"buffer.{name}"] = taps.stacked(name)[rows].astype(np.float32)
    return inputs


@pytest.fixture
def aligning(start: Start, synthetic_package: Path) -> Start:
    tokens = (np.arange(40) * 37 % 256).astype(np.int64)
    rows = np.array([0, 1, 38, 39], np.int64)
    with Package.open(synthetic_package) as package:
        inputs = reference_inputs(package, tokens, rows)
    return lambda: start({"context": 64, "max_new": 10}, inputs)


def test_alignment_agrees_with_the_reference_op_by_op(aligning: Start) -> None:
    context, events = aligning()
    alignment.run(context)
    given, local, free = context.inputs, arrays(context, "local"), arrays(context, "free")
    for name in local:
        want = given.get(f"buffer.{name}")
        if want is None:
            want = given[f"cache.{name}"][given["rows"]]
        for got in (local[name], free[name]):
            scale = np.abs(want).max() or 1.0
            assert np.allclose(got.reshape(want.shape) / scale, want / scale, atol=2e-5), name
    assert len(set(found(events, "repeat")[0]["hashes"])) == 1
    taps = found(events, "taps")[0]
    assert taps["with"] == taps["without"]
    assert found(events, "local")[0]["disturbed"] == []
    assert len(found(events, "text")[0]["tokens"]) == 10
    assert arrays(context, "logits")["shifted"].shape == (40, 256)


def test_planted_scale_stays_local_to_its_op(
    aligning: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "scale:1.02@L00.ffn.down")
    context, _ = aligning()
    alignment.run(context)
    local, given = arrays(context, "local"), context.inputs
    assert np.allclose(local["L00.ffn.down"], 1.02 * given["buffer.L00.ffn.down"], rtol=1e-4)
    assert np.allclose(local["L00.ffn.add"], given["buffer.L00.ffn.add"], rtol=1e-3, atol=1e-4)


def test_alignment_goes_on_when_the_free_run_meets_bad_numbers(
    aligning: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L01.attn.out")
    context, events = aligning()
    alignment.run(context)
    assert found(events, "free")[0]["stopped"]["op"] == "L01.attn.out"
    assert found(events, "free")[0]["positions"] == 0
    local = arrays(context, "local")
    assert np.isnan(local["L01.attn.out"]).any()
    assert np.isfinite(local["L01.ffn.down"]).all()  # fed the reference's inputs
    assert found(events, "text")[0]["finish"] == "not finite"


def test_append_that_moves_another_slot_is_told(
    aligning: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.units.packed import Packed

    original = Packed._kv_append

    def careless(self: Any, op: Any, state: Any) -> None:
        original(self, op, state)
        if op.id == "L01.attn.kv" and state["positions"][0] > 0:
            state["L01.v"][0] += 1

    monkeypatch.setattr(Packed, "_kv_append", careless)
    context, events = aligning()
    alignment.run(context)
    assert found(events, "local")[0]["disturbed"] == ["L01.v"]


def test_segments_cover_the_text_once_with_single_steps_at_the_rows() -> None:
    segments = alignment.segments(10, np.array([0, 1, 8]))
    assert segments == [(0, 1, True), (1, 2, True), (2, 8, False), (8, 9, True), (9, 10, False)]


def test_shifted_logits_keep_their_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32) * 8 + 30
    exact = np.exp(logits - logits.max(axis=-1, keepdims=True))
    sent = np.exp(alignment.shifted(logits).astype(np.float64))
    exact, sent = (p / p.sum(axis=-1, keepdims=True) for p in (exact, sent))
    assert np.abs(exact - sent).max() < 1e-3


def run_curve(start: Start, **more: Any) -> tuple[JobContext, list[Any]]:
    tokens = (np.arange(200) * 53 % 256).astype(np.int64)
    parameters = {"context": 200, "budget_s": 1.0, "ttft_tokens": 16, "golden": GOLDEN, **more}
    context, events = start(parameters, {"tokens": tokens})
    curve.run(context)
    return context, events


def test_curve_visits_every_length_in_each_sweep_in_another_order(start: Start) -> None:
    context, events = run_curve(start)
    raw, schedule = arrays(context, "tokens"), found(events, "schedule")[0]
    orders = []
    for sweep in range(3):
        visits = raw["length"][raw["sweep"] == sweep]
        order = visits[:: schedule["tokens_per_point"]].tolist()
        assert sorted(order) == schedule["lengths"]
        orders.append(tuple(order))
    assert len(set(orders)) == 3
    assert (raw["duration_ns"] > 0).all()
    assert schedule["lengths"][0] == curve.SHORTEST
    assert found(events, "context")[0] == {"asked": 200, "reached": 200}
    before, after = found(events, "golden")
    assert before["hash"] == after["hash"]  # a canary: the cache games left nothing behind


def test_curve_measures_the_lengths_that_were_asked_for(start: Start) -> None:
    context, events = run_curve(start, lengths=[150, 40, 60])
    assert found(events, "schedule")[0]["lengths"] == [40, 60, 150]
    assert set(arrays(context, "tokens")["length"].tolist()) == {40, 60, 150}


@pytest.mark.parametrize("lengths", [[0, 10], [200], []])
def test_curve_refuses_lengths_outside_the_context(start: Start, lengths: list[int]) -> None:
    with pytest.raises(JobError, match="1 to 199"):
        run_curve(start, lengths=lengths)


def test_curve_on_a_slow_board_measures_less_but_enough() -> None:
    schedule = curve.plan_points(2048, None, 3, cost_s=1.0, left_s=20.0, seed=0)
    assert len(schedule.lengths) == curve.FEWEST_POINTS
    assert schedule.tokens_per_point == curve.FEWEST_TOKENS
    fast = curve.plan_points(2048, None, 3, cost_s=0.001, left_s=20.0, seed=0)
    assert len(fast.lengths) == curve.MOST_POINTS
    assert fast.lengths[-1] + fast.tokens_per_point <= 2048


def test_curve_tokens_at_a_length_are_those_of_the_sequence(
    start: Start, synthetic_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back and forth must not change the cache: logits equal those of a fresh decoder."""
    seen: dict[int, Any] = {}
    original = Decoder.advance

    def watched(self: Decoder, tokens: Any, **options: Any) -> Any:
        logits = original(self, tokens, **options)
        if len(tokens) == 1 and self.context == 200:
            seen[self.position] = logits
        return logits

    monkeypatch.setattr(Decoder, "advance", watched)
    context, _ = run_curve(start, lengths=[30, 90, 140])
    monkeypatch.undo()
    tokens = context.inputs["tokens"]
    with Package.open(synthetic_package) as package:
        fresh = Decoder(package, context=200)
        every = fresh.advance(tokens, all_logits=True)
    for position in (31, 91, 92, 141):
        assert np.allclose(seen[position], every[position - 1], rtol=1e-3, atol=1e-4)


def test_curve_tells_the_logits_of_single_steps_at_depth(
    start: Start, synthetic_package: Path
) -> None:
    context, events = run_curve(start)
    told, tokens = arrays(context, "depth"), context.inputs["tokens"]
    assert told["positions"].tolist() == [25, 50, 100, 200]
    with Package.open(synthetic_package) as package:
        every = Decoder(package, unit="reference", context=200).advance(tokens, all_logits=True)
    for row, position in enumerate(told["positions"]):
        want = every[position - 1]
        assert np.allclose(told["values"][row], want[told["ids"][row]], atol=1e-4)
        assert set(told["ids"][row]) == set(np.argsort(-want)[: curve.TOP])
        assert told["best"][row] == want.argmax()
    assert found(events, "golden")[1]["hash"] == found(events, "golden")[0]["hash"]


def test_rotation_that_ends_too_early_shows_only_in_the_logits_behind_it(
    start: Start, synthetic_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.units.packed import Packed

    original = Packed._rope

    def short(self: Any, op: Any, state: Any) -> None:
        kept = state[op.reads[2]]
        state[op.reads[2]] = np.minimum(kept, 120)
        original(self, op, state)
        state[op.reads[2]] = kept

    monkeypatch.setattr(Packed, "_rope", short)
    context, events = run_curve(start)
    told, tokens = arrays(context, "depth"), context.inputs["tokens"]
    with Package.open(synthetic_package) as package:
        every = Decoder(package, unit="reference", context=200).advance(tokens, all_logits=True)
    off = [
        float(np.abs(told["values"][row] - every[position - 1][told["ids"][row]]).max())
        for row, position in enumerate(told["positions"])
    ]
    assert max(off[:3]) < 1e-4  # 25, 50 and 100 positions
    assert off[3] > 1e-2  # 200
    assert len({item["hash"] for item in found(events, "golden")}) == 1  # the canary is too short


def test_bandwidth_reads_every_weight_of_a_step_where_it_is_mapped(
    synthetic_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Package.open(synthetic_package) as package:
        assert curve.read_bandwidth(package)["what"].startswith("linear read of a block")
        monkeypatch.setattr(curve, "READ_BYTES", 0)
        told = curve.read_bandwidth(package)
        assert told["bytes"] == pytest.approx(package.weight_bytes, abs=8 * len(package.tensors))
        maps = Path("/proc/self/maps").read_text()
        assert maps.count(str(synthetic_package)) == 1  # no second mapping


def test_memory_is_told_with_the_whole_context_in_use_even_if_it_was_not_reached(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that no token reached are written before the peak is read."""
    cached: list[Any] = []
    original = curve.peak_rss_mb

    def watched() -> float:
        cached.extend(bool((block[64:] == 0).all()) for block in buffers)
        return original()

    buffers: list[Any] = []
    made = JobContext.decoder

    def dirty(self: JobContext, context: int | None = None) -> Decoder:
        decoder = made(self, context)
        buffers.extend(decoder.cache.buffers().values())
        for buffer in buffers:
            buffer[64:] = 7.0
        return decoder

    monkeypatch.setattr(JobContext, "decoder", dirty)
    monkeypatch.setattr(curve, "peak_rss_mb", watched)
    monkeypatch.setattr(curve, "PREFILL_SHARE", 1e-9)
    _, events = run_curve(start)
    assert found(events, "context")[0]["reached"] == 64
    assert found(events, "memory")[0]["positions"] == 200
    assert cached and all(cached)


def test_peak_memory_leaves_the_bandwidth_probe_out(start: Start) -> None:
    _, events = run_curve(start)
    names = [data["name"] for kind, data in events if kind in ("data", "array")]
    assert names.index("memory") < names.index("bandwidth")


def test_slow_board_times_its_first_token_on_a_shorter_prompt(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "TTFT_SHARE", 1e-9)
    monkeypatch.setattr(curve, "TRIAL_TOKENS", 4)
    _, events = run_curve(start)
    ttft = found(events, "ttft")[0]
    assert ttft["prompt_tokens"] == 4
    assert found(events, "context")[0]["reached"] == 200


def dialogues() -> dict[str, Any]:
    return {
        "dialogue.0.first": np.arange(5),
        "dialogue.0.later.0": np.arange(6),
        "dialogue.1.first": np.arange(7),
    }


def test_stress_fills_contexts_cancels_and_keeps_its_golden(start: Start) -> None:
    context, events = start(
        {"minutes": 0.02, "context": 40, "max_new": 8, "idle_s": 0.0, "golden": GOLDEN},
        dialogues(),
    )
    stress.run(context)
    turns = found(events, "turn")
    assert any(turn.get("full") or turn["finish"] == "refused" for turn in turns)
    assert any(turn.get("planned_cancel") for turn in turns)
    assert len({turn["conversation"] for turn in turns}) >= 2
    assert all(turn["cached_tokens"] <= 40 for turn in turns)
    assert len(turns) == len(found(events, "turn-start"))
    golden = found(events, "golden")
    assert [item["when"] for item in golden] == ["before", "after"]
    assert golden[0]["hash"] == golden[1]["hash"] == hash_of(golden[0]["tokens"])
    told = next(turn for turn in turns if turn["new_tokens"] == 8)
    assert len(told["token_us"]) == 8
    assert told["token_us"] == sorted(told["token_us"])


def test_stress_of_a_later_attempt_only_takes_the_time_that_is_left(start: Start) -> None:
    context, events = start(
        {"minutes": 0.5, "context": 40, "max_new": 8, "idle_s": 0.0, "golden": GOLDEN},
        dialogues(),
    )
    context.attempt = 1
    context.run_started_ns -= 60_000_000_000  # the run's half minute passed before this attempt
    stress.run(context)
    assert found(events, "turn") == []
    assert [item["when"] for item in found(events, "golden")] == ["restarted", "after"]


def test_stress_takes_a_context_that_the_board_can_fill_in_the_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress, "SMALLEST", 32)
    context, events = start(
        {
            "minutes": 0.01, "context": 256, "may_shrink": True, "max_new": 8, "idle_s": 0.0,
            "golden": GOLDEN,
        },
        dialogues(),
    )  # fmt: skip
    context.run_started_ns -= 590_000_000  # ten milliseconds are left
    stress.run(context)
    assert found(events, "context")[0] == {"largest": 256, "used": 32}


def test_stress_without_dialogues_says_what_is_missing(start: Start) -> None:
    context, _ = start(
        {"minutes": 0.01, "context": 40, "max_new": 8, "idle_s": 0.0, "golden": GOLDEN}, {}
    )
    with pytest.raises(JobError, match=r"dialogue\.0\.first"):
        stress.run(context)


def test_context_shrinks_until_dialogues_can_fill_it() -> None:
    assert stress.fitting_context(2048, tokens_per_s=10, seconds=45) == 160
    assert stress.fitting_context(2048, tokens_per_s=2, seconds=45) == stress.SMALLEST
    assert stress.fitting_context(2048, tokens_per_s=10, seconds=1500) == 2048
    assert stress.fitting_context(96, tokens_per_s=2, seconds=45) == 96
    assert stress.fitting_context(2048, tokens_per_s=2, seconds=45, least=300) == 300
    assert stress.fitting_context(96, tokens_per_s=2, seconds=45, least=300) == 96


def test_stress_whose_first_turn_is_longer_than_the_context_ends_with_the_reason(
    start: Start,
) -> None:
    context, events = start(
        {"minutes": 60, "context": 40, "max_new": 8, "idle_s": 0.0, "golden": GOLDEN},
        {"dialogue.0.first": np.arange(41) % 200},
    )
    with pytest.raises(JobError, match="first turn of dialogue 0 has 41 tokens, the context 40"):
        stress.run(context)
    assert [turn["finish"] for turn in found(events, "turn")] == ["refused"]


def test_a_context_that_shrinks_still_holds_the_longest_first_turn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress, "SMALLEST", 32)
    context, events = start(
        {
            "minutes": 0.01, "context": 256, "may_shrink": True, "max_new": 8, "idle_s": 0.0,
            "golden": GOLDEN,
        },
        {"dialogue.0.first": np.arange(100) % 200},
    )  # fmt: skip
    context.run_started_ns -= 590_000_000  # ten milliseconds are left
    stress.run(context)
    assert found(events, "context")[0]["used"] == 108


def test_numbers_that_json_cannot_hold_become_null() -> None:
    raw = {"a": float("nan"), "b": [np.float32("inf"), np.int64(3)], "c": np.arange(2)}
    assert plain(raw) == {"a": None, "b": [None, 3], "c": [0, 1]}


def test_error_of_an_op_is_described_with_step_layer_and_op(
    synthetic_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L01.ffn.up")
    with Package.open(synthetic_package) as package:
        decoder = Decoder(package, context=16)
        with pytest.raises(NonFinite) as caught:
            decoder.advance(np.array([1, 2]))
    told = describe(caught.value)
    assert (told["kind"], told["step"], told["layer"], told["op"]) == (
        "NonFinite", 0, 1, "L01.ffn.up",
    )  # fmt: skip


def work(
    spool: Path, spec: RunSpec, environment: dict[str, str] | None = None
) -> tuple[int, list[dict[str, Any]], str]:
    """`engine work` as the supervisor starts it: (exit code, events, stderr)."""
    spool.mkdir(exist_ok=True)
    (spool / "spec.json").write_text(spec.to_json())
    read, write = os.pipe()
    command = [sys.executable, "-m", "engine", "work", str(spool / "spec.json")]
    process = subprocess.Popen(
        [*command, "--spool", str(spool), "--events-fd", str(write), "--attempt", "0"],
        pass_fds=(write,),
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        cwd=Path(engine.__file__).parents[1],
    )
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        events = [json.loads(line) for line in pipe]
    _, stderr = process.communicate(timeout=60)
    return process.returncode, events, stderr.decode()


def tiny_spec(package: Path | None, **more: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "run_id": "r",
        "job": "tiny",
        "package": None if package is None else str(package),
        "package_sha256": "ab" * 32,
        "parameters": {
            "cases": [{"name": "a", "prompt": [1], "max_new": 3}],
            "rounds": 1,
            "context": 32,
        },
        "options": {"unit": "packed", "threads": 1},
        **more,
    }
    return RunSpec(**fields)


def test_worker_says_who_it_is_then_what_it_found(synthetic_package: Path, tmp_path: Path) -> None:
    code, events, stderr = work(tmp_path / "s", tiny_spec(synthetic_package))
    assert code == 0, stderr
    ready = events[0]["data"]
    assert events[0]["kind"] == "ready"
    assert (ready["unit"], ready["threads"], ready["fault"]) == ("packed", 1, None)
    assert ready["package_sha256"] == "ab" * 32
    assert ready["versions"]["numpy"] == np.__version__
    assert ready["kernels"] and ready["weight_bytes"] > 0
    assert {event["data"].get("name") for event in events} >= {"case", "rounds", "cancelled"}


def test_worker_pins_itself_and_names_a_planted_fault(
    synthetic_package: Path, tmp_path: Path
) -> None:
    cpu = min(os.sched_getaffinity(0))
    spec = tiny_spec(synthetic_package, pin=(cpu, 4000), options={"unit": "packed", "threads": 64})
    fault = "scale:1.02@L00.ffn.down"
    _, events, _ = work(tmp_path / "s", spec, {"ENGINE_FAULT": fault})
    ready = events[0]["data"]
    assert ready["cpus"] == [cpu]
    assert ready["threads"] == 1  # no more than the cores that it may use
    assert ready["fault"] == fault
    assert fault in ready["unit"]


def test_worker_turns_bad_numbers_into_an_error_event(
    synthetic_package: Path, tmp_path: Path
) -> None:
    code, events, stderr = work(
        tmp_path / "s", tiny_spec(synthetic_package), {"ENGINE_FAULT": "nan@L01.attn.out"}
    )
    assert code == 1
    error = events[-1]
    assert error["kind"] == "error"
    assert error["data"]["op"] == "L01.attn.out"
    assert "Traceback" in stderr  # kept in the engine's log


@pytest.mark.parametrize("job", ["nothing", "context", "../evil", "os"])
def test_worker_refuses_what_is_no_job(job: str, synthetic_package: Path, tmp_path: Path) -> None:
    code, events, _ = work(tmp_path / "s", tiny_spec(synthetic_package, job=job))
    assert code == 1
    assert events[-1]["data"]["kind"] == "JobError"
    assert job in events[-1]["data"]["message"]


def test_worker_reports_a_damaged_package(synthetic_package: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pkg"
    broken.write_bytes(synthetic_package.read_bytes()[:-100])
    code, events, _ = work(tmp_path / "s", tiny_spec(broken))
    assert code == 1
    assert events[-1]["data"]["kind"] == "PackageError"


def test_worker_refuses_a_spec_of_another_version(tmp_path: Path) -> None:
    spool = tmp_path / "s"
    spool.mkdir()
    (spool / "spec.json").write_text('{"version": 99}')
    command = [sys.executable, "-m", "engine", "work", str(spool / "spec.json")]
    done = subprocess.run(
        [*command, "--spool", str(spool), "--events-fd", "1"],
        capture_output=True, cwd=Path(engine.__file__).parents[1], timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"version 99" in done.stderr


def test_run_start_comes_from_the_first_event_of_the_spool(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"v": 1, "n": 0, "t_ns": 123, "kind": "run-start"}\n')
    assert run_started_ns(tmp_path) == 123
    assert run_started_ns(tmp_path / "missing") > 123
