"""The History page of a board and model: each number over its nights, with segments and events."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterator, Sequence

from dashboards import plain
from dashboards.charts import (
    Bar,
    Chart,
    Dot,
    Mark,
    Panel,
    Series,
    Table,
    hover_data,
    panel,
    x_scale,
)
from dashboards.data import Case, Results
from dashboards.nights import Health, Nights
from dashboards.pages.base import Page, Places
from dashboards.scales import Scale, Tick
from harness.farm.series import Point
from harness.farm.series import Series as OfNights
from harness.statistics.policy import baseline

BAND_SDS = 2.0
DAY_S = 86400.0
LABELS = 8  # dates along the axis


def pages(results: Results, places: Places, health: Health) -> Iterator[Page]:
    """Of each model of a board whose series are there."""
    by_case = Nights((health,)).by_case
    for case in results.cases:
        found = by_case.get((case.board.name, case.model, case.scheme))
        if found:
            yield page(case, found, places)


def page(case: Case, series: Sequence[OfNights], places: Places) -> Page:
    newest = max(series, key=lambda one: one.points[-1].at).points[-1].at
    views = [view(one, number) for number, one in enumerate(series, 1)]
    return Page(
        places.case(case, "history"),
        "history.html.jinja",
        {
            "title": f"History · {case.board.name}",
            "case": case,
            "active": "history",
            "views": views,
            "count": max(len(one.points) for one in series),
            "newest": newest,
            "health": places.health(case.board.name),
        },
    )


@dataclasses.dataclass(frozen=True)
class View:
    title: str
    verdict: str
    floor: str
    parameters: str
    chart: Chart
    segments: tuple[tuple[datetime.datetime, str], ...]


def view(one: OfNights, number: int) -> View:
    return View(
        one.metric.words[:1].upper() + one.metric.words[1:],
        verdict(one),
        one.floor.sentence[:1].upper() + one.floor.sentence[1:] + ".",
        one.key.parameters,
        chart(one, f"history-{number}"),
        tuple((one.points[place].at, told) for place, told in one.begins if place),
    )


def verdict(one: OfNights) -> str:
    """What the newest night is against its segment, in a sentence."""
    found = one.look
    if found.suspect is None or found.shift is None:
        return f"{found.nights} nights in this segment: too few to judge the newest."
    words = f"{plain.number(100 * found.shift)} % against {found.nights} nights before it"
    if found.suspect:
        return f"The newest night is worse: {words}."
    if found.improved:
        return (
            f"The newest night is better: {words}. The baseline stays; declare the change with "
            "`harness results event`."
        )
    return f"The newest night is within what nights differ by: {words}."


def chart(one: OfNights, id: str) -> Chart:
    """A dot for each night, a band of ± 2 standard deviations for each segment, events below."""
    start = one.points[0].at
    days = [(point.at - start).total_seconds() / DAY_S for point in one.points]
    values = [point.night.value for point in one.points]
    x = x_scale(-0.4, max(days[-1], 1.0) + 0.4)
    bands = list(_bands(one, days))
    extra = [edge for _, _, low, high in bands for edge in (low, high)]
    top, height = 50.0, 190.0
    body, y = panel(
        f"{one.metric.words}, {one.metric.unit}", [Series(days, values, "s1", "")], x,
        top=top, height=height, extra=extra,
    )  # fmt: skip
    dots = tuple(
        Dot(x(day), y(point.night.value), *_look_of(one, place), _words(one, place))
        for place, (day, point) in enumerate(zip(days, one.points, strict=True))
        if point.night.value is not None
    )
    body = dataclasses.replace(body, dots=dots)
    drawn = tuple(
        Bar(x(left), y(high), max(round(x(right) - x(left), 1), 2.0), round(y(low) - y(high), 1),
            "floor", f"{plain.number(low)} to {plain.number(high)} {one.metric.unit}")
        for left, right, low, high in bands
    )  # fmt: skip
    lane = Panel(
        "Events", body.bottom + 34, 22.0, (),
        bars=tuple(
            Bar(round(x(days[place]) - 3, 1), body.bottom + 36, 6.0, 18.0, "s2",
                f"{_day(one.points[place])}: {told}")
            for place, told in one.begins if place
        ),
    )  # fmt: skip
    marks = tuple(
        Mark(x(days[place]), "sweep", str(number), f"{_day(one.points[place])}: {told}")
        for number, (place, told) in enumerate(one.begins, 0)
        if place
    )
    legend = [("s1 circle", "a night"), ("band floor", "what nights of the segment differ by")]
    if one.apart:
        legend.append(("s5 triangle", "kept out of the baseline"))
    if any(not point.night.valid for point in one.points):
        legend.append(("s4 plus", "not judged: the clocks moved"))
    return Chart(
        id,
        f"{one.metric.words} over {len(one.points)} nights in {len(one.begins)} segments",
        (body, lane),
        _dates(one.points, days, x),
        "night",
        lane.bottom + 50,
        marks=marks,
        bands=drawn,
        legend=tuple(legend),
        hover=hover_data(x, days, lambda place: _words(one, place)),
        table=table(one),
    )


def _bands(one: OfNights, days: Sequence[float]) -> Iterator[tuple[float, float, float, float]]:
    """(from, to, low, high) of each segment: ± 2 standard deviations of its baseline, log scale."""
    edges = [place for place, _ in one.begins] + [len(one.points)]
    for begin, end in itertools.pairwise(edges):
        kept = baseline(one.nights[:end], begin, one.apart)
        logs = [math.log(one.nights[place].value or 1.0) for place in kept]
        if len(logs) < 2:
            continue
        mean = sum(logs) / len(logs)
        sd = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
        reach = BAND_SDS * sd
        yield (
            days[begin] - 0.3, days[end - 1] + 0.3, math.exp(mean - reach), math.exp(mean + reach)
        )  # fmt: skip


def _look_of(one: OfNights, place: int) -> tuple[str, str]:
    """(class, shape) of a night's dot."""
    if not one.points[place].night.valid:
        return "s4", "plus"
    return ("s5", "triangle") if place in one.apart else ("s1", "circle")


def _words(one: OfNights, place: int) -> str:
    point = one.points[place]
    value = plain.number(point.night.value, 4)
    build = f", engine {point.night.build[:8]}" if point.night.build else ""
    aside = "" if point.night.valid else ", not judged"
    return f"{_day(point)}: {value} {one.metric.unit}{build}{aside}"


def _day(point: Point) -> str:
    return f"{point.at.astimezone(datetime.UTC):%Y-%m-%d}"


def _dates(points: Sequence[Point], days: Sequence[float], x: Scale) -> tuple[Tick, ...]:
    stride = max(1, math.ceil(len(points) / LABELS))
    return tuple(
        Tick(x(days[place]), _day(points[place]), minor=(place // stride) % 3 > 0)
        for place in range(0, len(points), stride)
    )


def table(one: OfNights) -> Table:
    begins = dict(one.begins)
    segment = 0
    rows = []
    for place, point in enumerate(one.points):
        segment += place in begins
        rows.append(
            (
                _day(point),
                point.night.value,
                segment,
                point.night.build[:12],
                point.outcome,
                "no" if place in one.apart or not point.night.valid else "yes",
                begins.get(place, "") if place else "",
            )
        )
    unit = f"{one.metric.words}, {one.metric.unit}"
    columns = ("night", unit, "segment", "engine", "outcome", "in the baseline", "event")
    return Table(f"Nights: {one.metric.words}", columns, tuple(rows))
