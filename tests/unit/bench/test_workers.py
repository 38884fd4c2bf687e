"""The conductor's side of a worker: answers, refusals and deaths; races; the engine's worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import machine
from tests.bench.context import Bench
from tests.bench.llama_cpp import VARIABLE, NoLlama, environments
from tests.bench.profiles import attention_seconds, by_kind
from tests.bench.protocol import Worker, WorkerDied, WorkerError
from tests.bench.race import Race, golden, race
from tests.bench.runners import EngineRunner

ANSWERING = """
import os, sys
from tests.bench.protocol import serve
def add(a, b):
    print("stray words on stdout")
    return {"sum": a + b}
def refuse():
    raise ValueError("not today")
def die():
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 11)
def hang():
    import time
    time.sleep(600)
serve({"add": add, "refuse": refuse, "die": die, "hang": hang})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    found = Worker("w", [sys.executable, "-c", ANSWERING], tmp_path / "log")
    yield found
    found.close()


def test_a_worker_answers_whatever_its_libraries_print(worker: Worker, tmp_path: Path) -> None:
    assert worker.ask("add", a=2, b=3) == {"sum": 5}
    assert worker.ask("add", a=1, b=1) == {"sum": 2}
    worker.close()
    assert "stray words" in (tmp_path / "log").read_text()


def test_a_refusal_names_the_error_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="ValueError: not today"):
        worker.ask("refuse")
    with pytest.raises(WorkerError, match="KeyError"):
        worker.ask("no such thing")
    assert worker.ask("add", a=0, b=0) == {"sum": 0}


def test_a_death_names_signal_request_and_last_words(worker: Worker) -> None:
    with pytest.raises(WorkerDied, match=r"w ended by SIGSEGV in 'die'.*last words"):
        worker.ask("die")
    with pytest.raises(WorkerDied):
        worker.ask("add", a=1, b=1)


def test_a_worker_that_hangs_is_ended(worker: Worker) -> None:
    worker.ask("add", a=1, b=1)
    with pytest.raises(WorkerDied, match="SIGKILL in 'hang'"):
        worker.ask("hang", timeout_s=0.2)


def test_a_race_has_every_contestant_once_a_round_after_one_uncounted_turn() -> None:
    asked: list[str] = []

    def phase(name: str, cost: float) -> float:
        asked.append(name)
        return cost

    costs = {"slow": 2.0, "fast": 1.0}
    found = race({name: lambda n=name: phase(n, costs[n]) for name in costs}, 4, [])
    assert [asked.count(name) for name in costs] == [5, 5]
    assert found.ratio("slow", "fast").value == 2.0
    assert found.best(["slow", "fast"]) == "fast"


def test_races_of_several_launches_count_as_one() -> None:
    first = Race({"a": (2.0, 2.0), "b": (1.0, 1.0)}, {"others": 0.0, "stolen": 0.3})
    second = Race({"a": (9.0,), "b": (3.0,)}, {"others": 0.3, "stolen": 0.0})
    both = first + second
    assert both.costs == {"a": (2.0, 2.0, 9.0), "b": (1.0, 1.0, 3.0)}
    assert both.ratio("a", "b").high == 3.0
    assert both.shares == {"others": pytest.approx(0.1), "stolen": pytest.approx(0.2)}


def test_a_disturbed_machine_is_noted_and_a_quiet_one_is_not() -> None:
    assert machine.disturbance({"others": 0.01, "stolen": 0.0}) == []
    notes = machine.disturbance({"others": 0.25, "stolen": 0.1})
    assert "other processes had 25%" in notes[0]
    assert "hypervisor took 10%" in notes[1]


def test_time_of_a_workers_own_is_not_that_of_others() -> None:
    before = machine.Usage(100.0, 50.0, 1.0, 40.0)
    after = machine.Usage(110.0, 59.0, 2.0, 46.0)
    assert machine.taken(before, after) == {
        "others": pytest.approx(0.3),
        "stolen": pytest.approx(0.1),
    }


def test_the_machine_describes_itself() -> None:
    told = machine.description(Path(__file__).parents[3])
    assert told["processors allowed"] >= 1
    assert {"governor", "clock now (MHz)", "transparent huge pages", "revision"} <= set(told)


def test_ops_of_all_layers_are_put_together_most_expensive_first() -> None:
    ops = [
        {"op": "L00.attn.mix", "kinds": ["rope", "kv_append", "attention"], "seconds": 0.001},
        {"op": "L01.attn.mix", "kinds": ["rope", "kv_append", "attention"], "seconds": 0.002},
        {"op": "L00.ffn.down", "kinds": ["linear", "add"], "seconds": 0.004},
        {"op": "head.logits", "kinds": ["linear"], "seconds": 0.001},
    ]
    groups = by_kind(ops)
    assert [group["ops"] for group in groups] == [
        "ffn.down of all layers",
        "attn.mix of all layers",
        "head.logits",
    ]
    assert groups[0]["share"] == pytest.approx(0.5)
    assert attention_seconds(ops) == pytest.approx(0.003)


@pytest.mark.parametrize("python", [sys.executable, "/no/such/python"])
def test_an_environment_without_llama_cpp_says_so(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, python)
    with pytest.raises(NoLlama, match="no llama_cpp that can be imported"):
        environments(tmp_path, print)


def test_given_environments_are_known_by_how_they_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons = []
    for number, amx in enumerate((False, True, True)):
        python = tmp_path / f"python{number}"
        python.write_text(f"#!/bin/sh\necho 0.3.36 {amx}\n")
        python.chmod(0o755)
        pythons.append(str(python))
    monkeypatch.setenv(VARIABLE, ":".join(pythons))
    found = environments(tmp_path, print)
    assert [item.build for item in found] == ["without AMX", "with AMX", "with AMX, 3"]
    assert {item.version for item in found} == {"0.3.36"}


def test_nothing_is_built_where_that_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NoLlama, match="--no-build"):
        environments(tmp_path, print, build=False)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return Bench("b", 1, 2, True, True, tmp_path / "logs", lambda text: None, {"unit": "packed"})


def test_the_engines_worker_decodes_its_golden_tokens_and_goes_back(bench: Bench) -> None:
    model = bench.model("135m-q4_1")
    with bench.engine_worker() as worker:
        package = bench.package(model, layout="blocked")
        ours = EngineRunner("ours", worker, package, {"unit": "packed"}, 200, trace=True)
        assert bench.checks(model, [ours])[0].failure == ""
        ours.fill(model.tokens[:100])
        reference = bench.reference(model, 100, 8)
        for mode in ("decode", "prefill", "decode"):
            assert golden([ours], reference, model.tokens[100:108], mode)[0].failure == ""
            assert len(ours.phase(model.tokens[100:110])) == 10
        ops = ours.profile(model.tokens[100:104])
        assert attention_seconds(ops) > 0
        assert ours.bytes_per_token(10) > ours.bytes_per_token(0) == ours.weight_bytes


def test_a_wrong_engine_fails_its_golden_tokens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model("135m-q4_1")
    reference = bench.reference(model, 0)
    monkeypatch.setenv("ENGINE_FAULT", "scale:3@L01.ffn.down")
    with bench.engine_worker() as worker:
        package = bench.package(model, layout="blocked")
        ours = EngineRunner("ours", worker, package, {"unit": "packed"}, 64)
        check = golden([ours], reference, model.tokens[:32])[0]
    assert "differ" in check.failure
