"""How an engine ran, on the pages: unit, kernels, executor, threads."""

from __future__ import annotations

import datetime
from typing import Any

from dashboards import engines
from dashboards.data import Board, Campaign, Details, Run

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
READY: dict[str, Any] = {
    "unit": "native",
    "threads": 4,
    "cpus": [4, 5, 6, 7],
    "layout": "interleaved",
    "engine": {
        "executor": "compiled", "activations": "int8", "fused": True, "passes_off": ["qkv"],
        "kv": "int8", "kv_layout": "ds", "huge_pages": True, "keep": 4,
    },
    "kernels": {"all": "dotprod", "linear": "dotprod, slow for embed: layout row, not interleaved",
                "rope": "dotprod"},
    "native": {"isa": "dotprod", "reason": "the best that all allowed cores support",
               "library": "abc"},
}  # fmt: skip


def run(**values: Any) -> Run:
    return Run(
        id="r", campaign=Campaign("c", "bringup", "", None, NOW, None), board=Board("b"),
        model="m", scheme="W4", stage="curve", state="judged", outcome=None, headline="",
        culprit=None, remedy=None, error_kind=None, checks=(), details=Details("curve", None),
        started_at=NOW, finished_at=None, **values,
    )  # fmt: skip


def test_every_part_of_how_it_ran_has_a_row() -> None:
    rows = dict(engines.rows(run(engine=READY)))
    assert (
        rows["Kernels"] == "dotprod; linear: dotprod, slow for embed: layout row, not interleaved"
    )
    assert rows["Slow kernels"] == "linear embed: layout row, not interleaved"
    assert (rows["Threads"], rows["Cores"], rows["Executor"]) == ("4", "4-7", "compiled")
    assert rows["Fused ops"] == "yes, without qkv"
    assert rows["Keys and values"] == "int8, ds"
    assert rows["Weights"] == "interleaved, in huge pages"
    assert rows["Ring"] == "keeps the first 4 positions"


def test_a_line_sums_it_up() -> None:
    assert engines.line(run(engine=READY)).startswith("native unit, dotprod kernels, compiled")


def test_an_older_run_tells_what_its_ready_event_held() -> None:
    old = run(ready={"unit": "packed", "kernels": {"all": "numpy (openblas)"}, "threads": 1})
    assert engines.line(old) == ""
    assert dict(engines.rows(old)) == {
        "Unit": "packed", "Kernels": "numpy (openblas)", "Threads": "1",
    }  # fmt: skip
    assert engines.rows(run()) == ()
