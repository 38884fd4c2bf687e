"""The data page of one run: every number it left, as tables and as CSV."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards import engines, plain
from dashboards.charts import Table
from dashboards.data import STAGE_TITLES, Run
from dashboards.pages.alignment import kl_chart, ops_table
from dashboards.pages.base import Page, Places, key_figure, missing_note
from dashboards.pages.curve import points_table
from dashboards.pages.ops import profile_tables
from dashboards.pages.stress import samples_table, turns_table
from engine.placement import ranges

ROWS_SHOWN = 1000  # on the page; the CSV beside it has all


@dataclasses.dataclass(frozen=True)
class DataTable:
    table: Table  # at most ROWS_SHOWN rows
    whole: Table
    csv: str  # path of the CSV file, from the site's root


def page(run: Run, places: Places) -> Page:
    case = places.case_of(run)
    return Page(
        places.run(run),
        "run.html.jinja",
        {
            "title": f"Run · {STAGE_TITLES.get(run.stage, run.stage)} · {run.board.name}",
            "case": case,
            "active": "",
            "run": run,
            "stage_title": STAGE_TITLES.get(run.stage, run.stage),
            "figure": key_figure(run),
            "note": missing_note(run),
            "about": about(run),
            "engine": engines.rows(run),
            "tables": tables(run, places),
            "documents": tuple(
                (name, dump(value))
                for name, value in (
                    ("Parameters", run.parameters),
                    ("What the engine reported when ready", run.ready),
                    ("Board facts at the time", run.facts),
                )
                if value
            ),
        },
    )


def about(run: Run) -> tuple[tuple[str, str], ...]:
    rows = (
        ("Run", run.id),
        ("State", run.state),
        ("Attempt", str(run.attempt)),
        ("Error kind", run.error_kind or ""),
        ("Duration", plain.seconds(run.seconds) if run.seconds is not None else ""),
        ("Clocks", run.clocks),
        ("Boot", run.boot_id),
        ("Power mode", run.power_mode),
        ("Toolchain", run.toolchain),
        ("Engine", run.engine_hash),
        ("Model", run.model_hash),
        ("Fault planted on purpose", run.fault or ""),
    )
    return tuple((name, value) for name, value in rows if value)


def tables(run: Run, places: Places) -> tuple[DataTable, ...]:
    """All tables of the run's details, whole."""
    d = run.details
    found = []
    if d["memory_table"]:
        found.append(Table("Memory budget", ("what", "MiB"), d["memory_table"]))
    if run.stage == "profile":
        found += profile_tables(d)
    elif d["ops"]:
        found.append(ops_table(d["ops"]))
    if d["logits"] is not None:
        chart = kl_chart(d["logits"])
        if chart is not None and chart.table is not None:
            found.append(chart.table)
    if d["points"]:
        found.append(points_table(d["points"], d["fit"]))
    if d["rungs"]:
        found.append(rungs_table(d["rungs"]))
    if d["turns"]:
        found.append(turns_table(d["turns"]))
    if d["samples"]:
        found.append(samples_table(d["samples"]))
    return tuple(
        DataTable(table.thinned(ROWS_SHOWN), table, places.csv(run, table.caption))
        for table in found
    )


def rungs_table(rungs: Sequence[Any]) -> Table:
    """Every way to run that a ladder tried, in its order."""
    return Table(
        "Thread ladder",
        ("compared", "threads", "cores", "cache layout", "huge pages", "tok/s", "low", "high"),
        tuple(
            (
                rung.question.replace("_", " "),
                rung.threads,
                "all" if rung.cpus is None else ranges(rung.cpus),
                rung.kv_layout,
                "yes" if rung.huge_pages else "no",
                rung.tokens_per_s,
                rung.low,
                rung.high,
            )
            for rung in rungs
        ),
    )


def dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str)
