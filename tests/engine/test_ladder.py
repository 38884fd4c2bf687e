"""The thread ladder's part on the board, on this machine's own cores."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.measure import ladder
from engine.measure.context import JobContext
from engine.measure.ladder import Rung, best_of, placements
from engine.native.library import NativeUnavailable, load
from engine.package import Package
from engine.placement import Placement
from engine.records import RunSpec

BIG_LITTLE = "".join(f"cpu{n}/cpu_capacity {400 if n < 2 else 1024}\n" for n in range(4))


def test_candidates_are_narrowed_by_what_is_given() -> None:
    allowed = (0, 1, 2, 3)
    every = placements(BIG_LITTLE, allowed, {}, "native")
    assert every[0] == Placement(1, (2, 3))
    assert every[-1] == Placement(4, None)
    assert placements(BIG_LITTLE, allowed, {"threads": 2}, "native") == [
        Placement(2, (2, 3)), Placement(2, None),
    ]  # fmt: skip
    assert placements(BIG_LITTLE, allowed, {"cpus": [0, 1]}, "native") == [
        Placement(1, (0, 1)), Placement(2, (0, 1)),
    ]  # fmt: skip
    assert placements(BIG_LITTLE, allowed, {"threads": 9}, "native") == [Placement(9, None)]


def test_numpy_is_tried_in_one_thread_on_each_set_of_cores() -> None:
    found = placements(BIG_LITTLE, (0, 1, 2, 3), {}, "packed")
    assert found == [Placement(1, (2, 3)), Placement(1, None)]


def test_the_fewest_threads_that_are_as_fast_win() -> None:
    def rung(threads: int, *speeds: float) -> Rung:
        return Rung("threads", threads, None, "sd", False, [1e9 / speed for speed in speeds])

    assert best_of([rung(1, 50), rung(2, 98), rung(4, 100)]).threads == 2
    assert best_of([rung(1, 50), rung(2, 90), rung(4, 100)]).threads == 4
    # What differs by less than its repetitions do is alike.
    assert best_of([rung(1, 92, 80, 95, 99, 86), rung(2, 100, 90, 105, 94, 110)]).threads == 1
    assert best_of([rung(1, 50, 40, 60, 55, 45), rung(2, 100, 90, 105, 94, 110)]).threads == 2


@pytest.mark.parametrize("unit", ["packed", "native"])
def test_a_ladder_measures_every_rung_in_turns_and_leaves_the_cores_as_they_were(
    unit: str, synthetic_package: Path, tmp_path: Path
) -> None:
    if unit == "native":
        try:
            load()
        except NativeUnavailable as error:
            pytest.skip(f"needs a compiler: {error}")
    mask = os.sched_getaffinity(0)
    parameters: dict[str, Any] = {
        "golden": {"prompt": [1, 2, 3], "count": 4}, "rounds": 3, "budget_s": 0.3, "depth": 64,
    }  # fmt: skip
    if unit == "native":
        parameters.update(layouts=["sd", "ds"], huge=True)
    events: list[tuple[str, Mapping[str, Any]]] = []
    spec = RunSpec("r", "ladder", str(synthetic_package), None, parameters, options={"unit": unit})
    context = JobContext(
        spec,
        Package.open(synthetic_package),
        tmp_path,
        0,
        time.monotonic_ns(),
        lambda kind, data: events.append((kind, data)),
        spec.engine,
    )
    ladder.run(context)
    assert os.sched_getaffinity(0) == mask
    data = {d["name"]: d["value"] for kind, d in events if kind == "data"}
    rungs = data["rungs"]
    assert all(len(rung["medians_ns"]) == 3 and rung["tokens_per_s"] > 0 for rung in rungs)
    asked = [rung["question"] for rung in rungs]
    if unit == "native":
        assert asked.count("kv_layout") == 2 and asked.count("huge_pages") == 2
    else:
        assert asked == ["threads"]
    assert data["choice"] in rungs
    golden = [d["value"]["hash"] for kind, d in events if kind == "data" and d["name"] == "golden"]
    assert len(golden) == len(rungs) and len(set(golden)) == 1
    with np.load(context.spool / "arrays" / "visits.npz") as visits:
        assert set(visits["rung"]) == set(range(len(rungs)))
        order = visits["rung"][visits["step"] == 0]
        assert len(order) == 3 * len(rungs)
