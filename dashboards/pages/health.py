"""Board health: may this board's numbers be trusted? One page for all, and one for each board."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import plain
from dashboards.charts import Bars, Table, bars
from dashboards.data import Results
from dashboards.nights import Health
from dashboards.pages.base import Page, Places
from harness.farm.series import METRIC


def overview(results: Results, places: Places, floors: Mapping[str, str]) -> Page:
    """All boards. `floors` says of each the noise of a night: its series are not needed."""
    rows = [
        {
            "health": one,
            "link": places.health(one.board),
            "floor": floors.get(one.board, ""),
            "check": one.check,
        }
        for one in results.nights.health
    ]
    records = [
        (
            record.detector,
            record.alerts,
            record.right,
            record.wrong,
            record.open,
            None if record.precision is None else 100 * record.precision,
        )
        for record in results.nights.detectors
    ]
    columns = ("detector", "suspects", "right", "wrong", "open", "right, %")
    ledger = Table("How often detectors were right", columns, tuple(records))
    return Page(
        places.health(),
        "health.html.jinja",
        {"title": "Board health", "rows": rows, "ledger": ledger if records else None},
    )


def page(one: Health, results: Results, places: Places) -> Page:
    cases = [case for case in results.cases if case.board.name == one.board]
    alerts = tuple(
        (
            f"{alert.night:%Y-%m-%d}",
            METRIC[alert.metric].words if alert.metric in METRIC else alert.metric,
            None if alert.shift is None else 100 * alert.shift,
            alert.p,
            alert.decided,
            alert.told,
            {True: "yes", False: "no", None: "not known"}[alert.right],
        )
        for alert in one.alerts
    )
    columns = ("night", "metric", "shift, %", "p", "decided", "how", "detector right")
    return Page(
        places.health(one.board),
        "board_health.html.jinja",
        {
            "title": f"Health · {one.board}",
            "health": one,
            "floors": floors(one),
            "noise": noise_words(one),
            "alerts": Table("Suspects of nights", columns, alerts) if alerts else None,
            "histories": [
                (case, places.case(case, "history")) for case in cases if places.has_history(case)
            ],
            "cases": [(case, places.case(case)) for case in cases],
        },
    )


def floor_words(one: Health) -> str:
    """The best known floor of a time per token; "" where none is known."""
    floors = [series.floor.sd for series in one.series if series.metric.rate]
    known = [sd for sd in floors if sd is not None]
    return f"{plain.number(100 * min(known), 2)} %" if known else ""


def noise_words(one: Health) -> str:
    """Whether the board became noisier."""
    if one.noise.ratio is None:
        return "Too few nights to tell whether the board became noisier."
    told = f"the newest nights scatter {plain.number(one.noise.ratio, 2)} times as much as before"
    if one.noise.grew:
        return f"This board became noisier: {told} (p = {plain.number(one.noise.p, 2)})."
    return f"No noisier than it was: {told}."


def floors(one: Health) -> Bars | None:
    """The smallest change that shows in one night, for each number of each model."""
    found = [
        (series, series.floor)
        for series in one.series
        if series.floor.detectable is not None and series.floor.sd is not None
    ]
    if not found:
        return None
    table = Table(
        "Noise floors",
        ("metric", "model", "a night scatters by, %", "shows in one night, %", "pairs of nights"),
        tuple(
            (s.metric.words, s.model, 100 * (f.sd or 0), 100 * (f.detectable or 0), f.pairs)
            for s, f in found
        ),
    )
    return bars(
        "floors",
        "The smallest change that shows in one night",
        [
            (f"{s.metric.words}, {s.model}", [("s1", s.metric.words, 100 * (f.detectable or 0.0))])
            for s, f in found
        ],
        (),
        say=lambda amount: f"{plain.number(amount, 2)} %",
        table=table,
    )
