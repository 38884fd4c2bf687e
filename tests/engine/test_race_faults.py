"""Planted races in the real async executor, and the job that looks for them on a board."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import Decoder
from engine.measure import race
from engine.measure.context import JobContext
from engine.package import Package
from engine.program.schedule import AsyncOps
from engine.records import RunSpec
from engine.runtime.async_ import AsyncExecutor
from engine.units.faulty import Faulty, parse, plant

RACES = [
    "drop-edge@L01.attn.out",
    "wrong-queue@L00.attn.rope",
    "early-reuse@L00.attn.v",
    "undeclared-write@L01.attn.out",
]
Try = Callable[[AsyncOps], dict[str, Any]]


@pytest.fixture
def package(package_in: Callable[[str], Package]) -> Package:
    return package_in("Q4_1")


@pytest.fixture
def planted(package: Package) -> Iterator[Callable[[str], Try]]:
    """`planted(fault)(async ops)`: one trial with a fault."""
    closing: list[Decoder] = []

    def make(fault: str) -> Try:
        decoder = Decoder(package)
        reference = race.find_reference(decoder, [5, 90, 17], 3)
        executor = AsyncExecutor(decoder.program, plant(decoder.unit, fault))
        decoder.executor = executor
        closing.append(decoder)
        trials = race.Trials(decoder, executor, reference, 0.002)
        return lambda on: trials.run({"on": on if isinstance(on, str) else sorted(on)})

    yield make
    for decoder in closing:
        decoder.close()


@pytest.mark.parametrize("fault", RACES)
def test_a_planted_race_shows_only_while_its_op_is_asynchronous(
    fault: str, package: Package, planted: Callable[[str], Try]
) -> None:
    attempt, op = planted(fault), fault.partition("@")[2]
    others = [other.id for other in Decoder(package).program.ops if other.id != op]
    assert attempt("none")["result"] == "pass"
    assert [attempt("all")["result"] for _ in range(3)] == ["fail"] * 3
    assert [attempt([op])["result"] for _ in range(3)] == ["fail"] * 3
    assert [attempt(others)["result"] for _ in range(5)] == ["pass"] * 5
    assert attempt("none")["result"] == "pass"  # nothing of a trial meets the next one


def test_a_failed_trial_tells_which_conflicting_ops_overlapped(
    planted: Callable[[str], Try],
) -> None:
    told = planted("drop-edge@L01.attn.out")(["L01.attn.out"])
    assert told["signature"] == race.NUMBERS
    assert told["overlaps"][0] == {
        "first": "L01.attn.out",
        "second": "L01.attn.add",
        "hazard": "RAW",
        "buffer": "L01.attn.out",
        "as": "L01.attn.out",
    }


def test_a_race_of_two_steps_takes_both_and_one_that_is_hidden_the_other_off(
    planted: Callable[[str], Try],
) -> None:
    both = planted("drop-edge@L00.attn.out+L01.ffn.up")
    assert both(["L00.attn.out"])["result"] == "pass"
    assert both(["L01.ffn.up"])["result"] == "pass"
    assert both(["L00.attn.out", "L01.ffn.up"])["result"] == "fail"
    hidden = planted("drop-edge@L00.attn.out!L01.ffn.up")
    assert hidden(["L00.attn.out"])["result"] == "fail"
    assert hidden(["L00.attn.out", "L01.ffn.up"])["result"] == "pass"


def test_chance_is_seeded_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: str | None) -> list[float]:
        if seed is None:
            monkeypatch.delenv("ENGINE_FAULT_SEED", raising=False)
        else:
            monkeypatch.setenv("ENGINE_FAULT_SEED", seed)
        faults = parse("drop-edge:0.5@L00.attn.out;noise:0.5@L00.attn.q")
        return [fault.chance.random() for fault in faults for _ in range(3)]

    assert drawn("1") == drawn("1")
    assert drawn("1")[:3] != drawn("1")[3:]  # each fault has its own
    assert drawn("1") != drawn("2")
    assert drawn(None) != drawn(None)


def test_a_race_shows_with_its_probability(
    planted: Callable[[str], Try], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT_SEED", "3")
    attempt = planted("drop-edge:0.1@L01.attn.out")
    failed = [attempt("all")["result"] == "fail" for _ in range(60)]
    assert 5 <= sum(failed) <= 30  # of three steps each: 27 %


def test_background_failures_come_whatever_is_asynchronous(
    planted: Callable[[str], Try], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT_SEED", "1")
    attempt = planted("noise:0.3@L01.attn.out")
    failed = [attempt("none")["result"] == "fail" for _ in range(20)]
    assert 3 <= sum(failed) < 20


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("wrong-queue@L00.attn.q", "such as embed.tokens"),
        ("early-reuse@L00.attn.out", "such as L00.attn.v"),
        ("undeclared-write@L00.attn.q", "such as L00.attn.norm"),
        ("drop-edge@L07.attn.out", "no op 'L07.attn.out'"),
        ("drop-edge@L00.attn.out+L09.x", "no op 'L09.x'"),
    ],
)
def test_a_race_that_cannot_be_planted_names_an_op_where_it_can(
    fault: str, found: str, package: Package
) -> None:
    decoder = Decoder(package)
    with pytest.raises(ValueError, match=found):
        AsyncExecutor(decoder.program, plant(decoder.unit, fault))


def test_races_change_nothing_under_the_other_executors(package: Package) -> None:
    plain, faulty = Decoder(package), Decoder(package)
    unit = plant(faulty.unit, "drop-edge@L01.attn.out")
    assert isinstance(unit, Faulty)
    assert len(unit.races) == 1
    faulty = Decoder(package, with_unit=unit)
    tokens = np.array([5, 90, 17])
    np.testing.assert_array_equal(faulty.advance(tokens), plain.advance(tokens))


def test_flags_and_delays_can_be_changed_between_steps(package: Package) -> None:
    decoder = Decoder(package)
    with AsyncExecutor(decoder.program, decoder.unit) as executor:
        decoder.executor = executor
        decoder.advance(np.array([5]))
        executor.change("none", {"L00.attn.q": 0.02})
        assert not executor.schedule.asynchronous
        begin = time.perf_counter()
        decoder.advance(np.array([6]))
        assert time.perf_counter() - begin >= 0.02
        with pytest.raises(ValueError, match=r"L00\.attn\.qq"):
            executor.change(["L00.attn.qq"], {})
        with pytest.raises(ValueError, match="expected seconds"):
            executor.change("all", {"L00.attn.q": -1.0})
        assert not executor.schedule.asynchronous  # what was refused changed nothing


@pytest.fixture
def run_job(
    synthetic_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, list[Any]]]:
    """`run_job(fault, questions)`: what the job told, by name."""

    def run(
        fault: str,
        questions: list[dict[str, Any]],
        told: dict[str, list[Any]] | None = None,
        **more: Any,
    ) -> dict[str, list[Any]]:
        monkeypatch.setenv("ENGINE_FAULT", fault)
        told = {} if told is None else told

        def keep(kind: str, data: Mapping[str, Any]) -> None:
            told.setdefault(str(data.get("name", kind)), []).append(data.get("value", data))

        parameters = {
            "prompt": [1, 5, 9],
            "steps": 3,
            "context": 32,
            "delay_s": 0.002,
            "questions": questions,
            **more,
        }
        spec = RunSpec("r", "race", str(synthetic_package), None, parameters)
        with Package.open(synthetic_package) as package:
            race.run(JobContext(spec, package, tmp_path, 0, time.monotonic_ns(), keep))
        return told

    return run


def test_the_job_makes_many_trials_and_ends_a_question_with_its_first_failure(
    run_job: Callable[..., dict[str, list[Any]]],
) -> None:
    op = "L01.attn.out"
    told = run_job(
        f"drop-edge@{op}",
        [
            {"on": "none", "repeats": 3},
            {"on": "all", "delayed": "all", "repeats": 5},
            {"on": [op], "delayed": [op], "repeats": 5},
            {"on": ["L00.attn.q"], "repeats": 2},
        ],
    )
    (steps,), (reference,) = told["steps"], told["reference"]
    assert steps["parts"][op] == "matrix"
    assert steps["findings"] == []  # the schedule is right, the executor is not
    assert len(reference["hashes"]) == 3
    ended = [(item["question"], item["repeat"], item["result"]) for item in told["trial"]]
    assert ended == [
        (0, 0, "pass"), (0, 1, "pass"), (0, 2, "pass"),
        (1, 0, "fail"), (2, 0, "fail"),
        (3, 0, "pass"), (3, 1, "pass"),
    ]  # fmt: skip
    again = run_job("", [{"on": "all", "repeats": 1}], reference=reference)
    assert again["reference"] == [reference]  # what it is given, it does not compute anew
    wrong = {**reference, "hashes": ["0" * 16] * 3}
    (trial,) = run_job("", [{"on": "none", "repeats": 1}], reference=wrong)["trial"]
    assert trial["result"] == "fail"


def test_an_error_before_the_first_trial_is_told_before_the_reference(
    run_job: Callable[..., dict[str, list[Any]]],
) -> None:
    told: dict[str, list[Any]] = {}
    with pytest.raises(ValueError, match="wrong-queue cannot be planted in L00"):
        run_job("wrong-queue@L00.attn.q", [{"on": "all", "repeats": 1}], told=told)
    assert "reference" not in told


def test_a_model_that_is_not_stable_synchronously_has_no_trials(
    run_job: Callable[..., dict[str, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = "scale:1.5@L00.attn.q;noise:0.5@L00.attn.q;noise:0.5@L01.attn.q"
    monkeypatch.setenv("ENGINE_FAULT_SEED", "2")
    told = run_job(noisy, [{"on": "all", "repeats": 1}])
    assert told["unstable"] == ["everything synchronous, 3 decodes gave 3 results"]
    assert "trial" not in told


def test_non_finite_numbers_are_a_signature_of_their_own(
    run_job: Callable[..., dict[str, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = run_job("", [])["reference"][0]
    told = run_job("nan@L01.attn.out", [{"on": "all", "repeats": 2}], reference=reference)
    assert [item["signature"] for item in told["trial"]] == [race.NON_FINITE]
    assert "ENGINE_FAULT" in os.environ
