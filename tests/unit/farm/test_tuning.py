"""What a stored measurement of a board holds for, and when it is made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.options import EngineOptions
from harness.boards.facts import CpuFacts, Facts
from harness.deploy.push import Deployment
from harness.farm.placing import Placed
from harness.farm.tuning import facts_hash, tuning_key
from harness.inventory import Board, Engine
from harness.store import Store

FACTS = Facts(
    machine="aarch64", kernel="Linux 6.1", boot_id="one", available_mb=900, governor="ondemand",
    cpus=(CpuFacts(number=0, capacity=400), CpuFacts(number=1, capacity=1024)),
)  # fmt: skip


def placed(facts: Facts = FACTS, engine: str = "e") -> Placed:
    deployment = Deployment("/root", ("python3",), {}, {}, "/root")
    return Placed(facts, engine, deployment)


def key(
    facts: Facts = FACTS, engine: str = "e", model: str = "m", kv: str = "f16", pin: str = "auto"
) -> str:
    board = Board(name="b", host="h", pin=pin)
    options = EngineOptions(unit="native", kv=kv, kv_layout="sd")
    return tuning_key(placed(facts, engine), board, model, options, Engine())


def test_a_reboot_changes_nothing() -> None:
    again = FACTS.model_copy(update={"boot_id": "two", "available_mb": 100, "clock_s": 1.0})
    assert facts_hash(again) == facts_hash(FACTS)
    assert key(again) == key()


@pytest.mark.parametrize(
    "changed",
    [
        key(FACTS.model_copy(update={"governor": "performance"})),
        key(FACTS.model_copy(update={"cpus": FACTS.cpus[:1]})),
        key(FACTS.model_copy(update={"kernel": "Linux 6.2"})),
        key(engine="another"),
        key(model="another"),
        key(kv="int8"),
        key(pin="big"),
    ],
    ids=["governor", "cores", "kernel", "engine", "model", "kv", "pin"],
)
def test_another_board_engine_model_or_option_is_measured_anew(changed: str) -> None:
    assert changed != key()


def test_a_tuning_is_found_under_its_key_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path / "results.sqlite") as store:
        more = {"engine_hash": "e", "facts_hash": "f", "model_hash": "m", "run_id": "r"}
        store.record_tuning("b", "k", found={"threads": 2, "cpus": None}, **more)
        row = store.tuning("b", "k")
        assert row is not None and row.found == {"threads": 2, "cpus": None}
        assert store.tuning("b", "other") is None
        assert store.tuning("other", "k") is None
        store.record_tuning("b", "k", found={"threads": 4, "cpus": [1]}, **more)
        again = store.tuning("b", "k")
        assert again is not None and again.found == {"threads": 4, "cpus": [1]}


def test_old_tunings_of_a_board_are_forgotten(tmp_path: Path) -> None:
    from harness.store.store import KEPT_TUNINGS

    with Store.open(tmp_path / "results.sqlite") as store:
        for number in range(KEPT_TUNINGS + 3):
            store.record_tuning(
                "b", f"k{number}", engine_hash="e", facts_hash="f", model_hash="m", run_id="r",
                found={"threads": 1},
            )  # fmt: skip
        assert store.tuning("b", "k0") is None
        assert store.tuning("b", f"k{KEPT_TUNINGS + 2}") is not None
