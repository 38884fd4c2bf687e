"""Charts as geometry: plain records of pixels and words that one template draws as SVG.

No colours here: every mark carries a class name, and the style sheet gives it a colour for light,
dark and print. Widths are in the units of the view box; the drawing scales with its column.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence

from dashboards import plain
from dashboards.scales import Scale, Tick, bounds, decimate, log_ticks, path, ticks

WIDTH = 760
LEFT = 74  # room for y labels, at the larger letters of narrow screens too
RIGHT = 18
PANEL_GAP = 26
COLUMNS = 340  # of min-max thinning: two points a column fill the drawing's width


@dataclasses.dataclass(frozen=True)
class Table:
    """Data as people and programs read it: raw cells, formatted by the template. `digits` are the
    significant ones that are shown; sorting and CSV files have all."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str = ""
    digits: int = 6

    @functools.cached_property  # a template asks for every row
    def numeric(self) -> tuple[bool, ...]:
        """For each column: does it hold numbers (they stand to the right)?"""
        return tuple(
            any(isinstance(row[index], (int, float)) for row in self.rows)
            for index in range(len(self.columns))
        )

    def thinned(self, limit: int) -> Table:
        """At most `limit` evenly spread rows, with a note that says so."""
        if len(self.rows) <= limit:
            return self
        stride = math.ceil(len(self.rows) / limit)
        note = f"Every {stride}. of {len(self.rows)} rows; the run's data page has them all."
        return dataclasses.replace(self, rows=self.rows[::stride], note=note)


@dataclasses.dataclass(frozen=True)
class Line:
    path: str
    style: str


@dataclasses.dataclass(frozen=True)
class Dot:
    x: float
    y: float
    style: str  # series class; the shape follows from it: s1 circle, s2 square, s3 triangle …
    shape: str
    title: str


@dataclasses.dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    style: str
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical (or, with `y`, horizontal) line with a short word at its end."""

    x: float
    style: str
    label: str = ""
    title: str = ""
    y: float | None = None
    anchor: str = "middle"


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    top: float
    height: float
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...] = ()
    dots: tuple[Dot, ...] = ()
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclasses.dataclass(frozen=True)
class Chart:
    """Panels over one x axis. `hover` is what the optional script shows beside the pointer."""

    id: str
    summary: str  # what a screen reader says
    panels: tuple[Panel, ...]
    x_ticks: tuple[Tick, ...]
    x_label: str
    height: float
    marks: tuple[Mark, ...] = ()  # through all panels
    bands: tuple[Bar, ...] = ()  # behind all panels
    legend: tuple[tuple[str, str], ...] = ()  # (class, words)
    hover: str = ""
    table: Table | None = None
    width: float = WIDTH
    left: float = LEFT
    right: float = WIDTH - RIGHT


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a panel. `ys` may hold None: a gap."""

    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str
    name: str


SHAPES = ("circle", "square", "triangle", "diamond", "plus")


def shape_of(index: int) -> str:
    return SHAPES[index % len(SHAPES)]


def x_scale(low: float, high: float) -> Scale:
    if high <= low:
        high = low + 1.0
    return Scale(low, high, LEFT, WIDTH - RIGHT)


def panel(
    title: str,
    series: Sequence[Series],
    x: Scale,
    *,
    top: float,
    height: float,
    zero: bool = False,
    extra: Sequence[float] = (),
    y_count: int = 4,
) -> tuple[Panel, Scale]:
    """A panel of lines with its y scale. `extra` values (limits) also fit into the scale."""
    values = [y for one in series for y in one.ys if y is not None]
    low, high = bounds([*values, *extra], zero=zero)
    y = Scale(low, high, top + height, top)
    lines = []
    for one in series:
        for stretch in decimate(one.xs, one.ys, COLUMNS):
            if len(stretch) == 1:  # a lone sample between gaps still shows
                stretch = [stretch[0], (stretch[0][0] + (x.high - x.low) / 400, stretch[0][1])]
            lines.append(Line(path([(x(px), y(py)) for px, py in stretch]), one.style))
    return Panel(title, top, height, ticks(y, y_count), tuple(lines)), y


def hover_data(x: Scale, xs: Sequence[float], says: Callable[[int], str], limit: int = 400) -> str:
    """JSON [[pixel, text], …] with at most `limit` entries, ascending."""
    stride = max(1, math.ceil(len(xs) / limit))
    rows = [[x(xs[index]), says(index)] for index in range(0, len(xs), stride)]
    return json.dumps(rows, ensure_ascii=True, separators=(",", ":"))


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a bar; `x` and `width` are percent of the bar."""

    x: float
    width: float
    style: str
    name: str
    amount: str
    share: str = ""


@dataclasses.dataclass(frozen=True)
class Limit:
    x: float
    name: str
    amount: str
    style: str = "limit"


@dataclasses.dataclass(frozen=True)
class Bars:
    """Horizontal bars on one scale that begins at 0; positions are percent of the width.

    Each row is (words, segments); with one segment a row it is a plain bar chart, with several a
    budget.
    """

    id: str
    summary: str
    rows: tuple[tuple[str, tuple[Segment, ...]], ...]
    limits: tuple[Limit, ...]
    table: Table


def bars(
    id: str,
    summary: str,
    rows: Sequence[
        tuple[str, Sequence[tuple[str, str, float]]]
    ],  # (words, [(class, name, amount)])
    limits: Sequence[tuple[str, float]],
    *,
    say: Callable[[float], str],
    table: Table,
) -> Bars:
    """Bars of stacked parts against limits, all in one unit that `say` puts into words."""
    totals = [sum(max(amount, 0.0) for _, _, amount in parts) for _, parts in rows]
    high = max([*(total * 1.02 for total in totals), *(a * 1.03 for _, a in limits), 1e-9])
    scale = Scale(0.0, high, 0.0, 100.0)
    drawn = []
    for (words, parts), total in zip(rows, totals, strict=True):
        start, segments = 0.0, []
        for style, name, amount in parts:
            if amount > 0:
                left, right = 100 * start / high, 100 * (start + amount) / high
                segments.append(
                    Segment(
                        round(left, 2),
                        round(max(right - left, 0.3), 2),
                        style,
                        name,
                        say(amount),
                        f"{100 * amount / total:.0f} %" if len(parts) > 1 else "",
                    )
                )
                start += amount
        drawn.append((words, tuple(segments)))
    marks = tuple(Limit(scale(amount), name, say(amount)) for name, amount in limits)
    return Bars(id, summary, tuple(drawn), marks, table)


def _anchor(at: float) -> str:
    return "start" if at < WIDTH * 0.25 else "end" if at > WIDTH * 0.55 else "middle"


def histogram(
    id: str, summary: str, bins: Sequence[tuple[float, int]], *, x_label: str, table: Table
) -> Chart | None:
    """Bars over log10 values. `bins` are (lower edge, count), ascending; None where all are empty.

    The first bin may begin at minus infinity (values of exactly 0): it is drawn one bin wide.
    """
    filled = [index for index, (_, count) in enumerate(bins) if count]
    if not filled:
        return None
    bins = bins[max(0, filled[0] - 2) : filled[-1] + 3]  # empty tails would press it together
    finite = [edge for edge, _ in bins if math.isfinite(edge)]
    if not finite:
        return None
    width = min((b - a for a, b in itertools.pairwise(finite)), default=1.0) or 1.0
    placed = [(edge if math.isfinite(edge) else finite[0] - width, count) for edge, count in bins]
    x = x_scale(placed[0][0], placed[-1][0] + width)
    height = 150.0
    top = 30.0
    y = Scale(0.0, max(count for _, count in placed) * 1.08, top + height, top)
    bars = tuple(
        Bar(
            round(x(edge) + 1, 1),
            y(count),
            round(max(x(edge + width) - x(edge) - 2, 1), 1),
            round(top + height - y(count), 1),
            "s1",
            f"KL 1e{plain.number(edge)} to 1e{plain.number(edge + width)}: {count} positions",
        )
        for edge, count in placed
        if count
    )
    body = Panel("positions", top, height, ticks(y, 3), bars=bars)
    return Chart(id, summary, (body,), log_ticks(x), x_label, top + height + 48, table=table)


def _column_labels(columns: Sequence[str], left: float, across: float) -> tuple[Tick, ...]:
    """Every fifth layer (more seldom for deep models), and what is no layer at both ends."""
    layers = sum(name.isdigit() for name in columns)
    stride = 5 * max(1, math.ceil(layers / 40))
    found = []
    for index, name in enumerate(columns):
        start = left + index * across
        if name.isdigit():
            if int(name) % stride == 0:
                minor = layers > 20 and int(name) % (2 * stride) > 0
                found.append(Tick(round(start + across / 2, 1), name, minor))
        else:
            found.append(Tick(round(start + across - 1, 1), name, minor=True, anchor="end"))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Cell:
    x: float
    y: float
    width: float
    height: float
    style: str
    title: str


@dataclasses.dataclass(frozen=True)
class Heat:
    """Rows of ops over columns of layers. `ring` is the first bad cell."""

    id: str
    summary: str
    cells: tuple[Cell, ...]
    row_labels: tuple[tuple[float, str], ...]
    column_labels: tuple[Tick, ...]
    ring: Cell | None
    ring_label: str
    ring_anchor: str
    height: float
    left: float
    width: float = WIDTH


def heat(
    id: str,
    summary: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[int, int], tuple[str, str] | None],  # (class, title) of (row, column)
    *,
    ring: tuple[int, int] | None = None,
    ring_label: str = "",
    left: float = 140,
    row_height: float = 24,
) -> Heat:
    """A grid that fills the width; absent cells stay blank."""
    top = 34.0 if ring is not None else 4.0
    across = (WIDTH - left - 4) / max(len(columns), 1)
    across = min(across, 44.0)
    gap = 1.0 if across > 6 else 0.4
    cells = []
    ringed = None
    for row in range(len(rows)):
        for column in range(len(columns)):
            found = cell(row, column)
            if found is None:
                continue
            one = Cell(
                round(left + column * across, 1),
                round(top + row * row_height, 1),
                round(across - gap, 1),
                row_height - gap,
                *found,
            )
            cells.append(one)
            if ring == (row, column):
                ringed = one
    labels = _column_labels(columns, left, across)
    bottom = top + len(rows) * row_height
    names = tuple(
        (round(top + (index + 0.5) * row_height, 1), name) for index, name in enumerate(rows)
    )
    anchor = "middle" if ringed is None else _anchor(ringed.x)
    return Heat(
        id, summary, tuple(cells), names, labels, ringed, ring_label, anchor, bottom + 34, left
    )
