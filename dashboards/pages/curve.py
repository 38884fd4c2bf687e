"""The Curve page: time per token against context length, where it jumps, and why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from dashboards import plain
from dashboards.charts import (
    WIDTH,
    Chart,
    Dot,
    Line,
    Mark,
    Panel,
    Series,
    Table,
    hover_data,
    panel,
    shape_of,
    x_scale,
)
from dashboards.data import Case, Run
from dashboards.pages.base import Page, Places, clock_note, missing_note
from dashboards.scales import Scale, bounds, path, ticks, time_ticks
from harness.jobs.details import CurveFit, CurveJump, CurvePoint

CAUSES = {
    "engine": (
        "same length in every sweep: the engine changes its behaviour there "
        "(a tile multiple, a cache size, the allocator)"
    ),
    "throttling": "same time in every sweep: the board slowed down, not the engine",
    "unclear": "neither the same length nor the same time in every sweep",
}
MODELS = {
    "affine": "a straight line",
    "kink": "a line with a bend",
    "step": "a line with a step",
    "step+kink": "a line with a step and a bend",
}


def page(case: Case, run: Run, places: Places) -> Page:
    details = run.details
    points: Sequence[CurvePoint] = details["points"] or ()
    fit: CurveFit | None = details["fit"]
    return Page(
        places.case(case, "curve"),
        "curve.html.jinja",
        {
            "title": f"Curve · {case.board.name}",
            "case": case,
            "active": "curve",
            "run": run,
            "run_link": places.run(run),
            "note": missing_note(run),
            "details": details,
            "clocks": clock_note(run),
            "chart_of": curve_chart(points, fit) if points else None,
            "times": wall_chart(points, fit) if points else None,
            "jumps": fit.jumps if fit else (),
            "causes": CAUSES,
            "fit_words": fit_words(fit) if fit else "",
            "figures": figures(run),
        },
    )


def fit_words(fit: CurveFit) -> str:
    """The fit in one sentence."""
    text = (
        f"{MODELS.get(fit.model, fit.model).capitalize()}: {plain.number(fit.intercept_ms)} ms at "
        f"an empty cache, plus {plain.number(fit.slope_us_per_position)} µs per cached position"
    )
    if fit.model != "affine":
        text += f"; it explains the points better than a straight line by {fit.delta_bic:.0f} BIC"
    return text + "."


def figures(run: Run) -> tuple[tuple[str, str], ...]:
    """The page's key figures as (name, value), only those that are known."""
    d = run.details
    ceiling = d["ceiling_tokens_per_s"]
    rows = [
        ("Start of context", d["tokens_per_s_start"], "tok/s"),
        ("End of context", d["tokens_per_s_end"], "tok/s"),
        ("End over start", d["end_ratio"], ""),
        ("TTFT", d["ttft_s"], "s"),
        ("Prefill", d["prefill_tokens_per_s"], "tok/s"),
        ("Bandwidth", d["bandwidth_gb_s"], "GB/s"),
        ("Ceiling", ceiling, "tok/s"),
        ("Peak memory", d["rss_peak_mb"], "MiB"),
    ]
    return tuple(
        (name, f"{plain.number(v)} {unit}".strip()) for name, v, unit in rows if v is not None
    )


def fitted_at(fit: CurveFit, length: float) -> float | None:
    """The fitted time at `length`, between the fit's own nodes; None outside or without nodes."""
    nodes = sorted(fit.fitted)
    for (x0, y0), (x1, y1) in itertools.pairwise(nodes):
        if x0 <= length <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (length - x0) / (x1 - x0)
    return nodes[0][1] if len(nodes) == 1 and nodes[0][0] == length else None


def _fit_lines(fit: CurveFit, x: Scale, y: Scale) -> tuple[Line, ...]:
    """The fitted curve, cut where it jumps so that a step is not drawn as a slope. Throttling is
    divided out of it."""
    nodes = sorted(fit.fitted)
    cuts = {jump.length for jump in fit.jumps if jump.cause != "throttling"}
    pieces: list[list[tuple[float, float]]] = [[]]
    for length, value in nodes:
        if length in cuts and pieces[-1]:
            pieces.append([])
        pieces[-1].append((x(length), y(value)))
    return tuple(Line(path(piece), "fit") for piece in pieces if len(piece) > 1)


def _jump_marks(jumps: Sequence[CurveJump], x: Scale) -> tuple[Mark, ...]:
    """At lengths; what happened at a time is no matter of length, see `_slowdown_marks`."""
    return tuple(
        Mark(
            x(jump.length),
            f"jump {jump.cause}",
            str(number),
            f"{jump.length} positions: × {plain.number(jump.ratio)}, {jump.cause}",
        )
        for number, jump in enumerate(jumps, 1)
        if jump.cause != "throttling"
    )


def _slowdown_marks(jumps: Sequence[CurveJump], x: Scale) -> tuple[Mark, ...]:
    """At times, with the numbers that the jumps have in the page's list."""
    return tuple(
        Mark(
            x(jump.started_s),
            "jump throttling",
            str(number),
            f"{plain.seconds(jump.started_s)}: × {plain.number(jump.ratio)}, throttling",
        )
        for number, jump in enumerate(jumps, 1)
        if jump.cause == "throttling" and jump.started_s is not None
    )


def _point_words(point: CurvePoint) -> str:
    speed = f", {plain.number(1000 / point.tpot_ms)} tok/s" if point.tpot_ms > 0 else ""
    return (
        f"sweep {point.sweep + 1}, {point.length} positions: "
        f"{plain.number(point.tpot_ms, 4)} ms{speed}"
    )


def curve_chart(points: Sequence[CurvePoint], fit: CurveFit | None) -> Chart:
    """TPOT against length, one shape per sweep, with the fit; residuals below."""
    lengths = [point.length for point in points]
    low, high = bounds([float(length) for length in lengths], pad=0.02)
    x = x_scale(max(0.0, low), high)
    sweeps = sorted({point.sweep for point in points})
    values: list[float | None] = [point.tpot_ms for point in points]
    extra = [value for _, value in fit.fitted] if fit else []
    top, height = 50.0, 250.0
    body, y = panel(
        "TPOT, ms", [Series(lengths, values, "", "")], x, top=top, height=height, extra=extra
    )
    dots = tuple(
        Dot(
            x(point.length),
            y(point.tpot_ms),
            f"s{1 + sweeps.index(point.sweep) % 6}",
            shape_of(sweeps.index(point.sweep)),
            _point_words(point),
        )
        for point in points
    )
    body = dataclasses.replace(body, lines=_fit_lines(fit, x, y) if fit else (), dots=dots)
    panels = [body]
    legend = [
        (f"s{1 + index % 6} {shape_of(index)}", f"sweep {sweep + 1}")
        for index, sweep in enumerate(sweeps)
    ]
    bottom = body.bottom
    if fit and fit.fitted:
        residual = residual_panel(points, fit, x, top=bottom + 40, height=90)
        panels.append(residual)
        bottom = residual.bottom
        legend.append(("line fit", "fit"))
    by_length = sorted(points, key=lambda point: point.length)
    hover = hover_data(
        x,
        [float(point.length) for point in by_length],
        lambda index: _point_words(by_length[index]),
    )
    return Chart(
        "curve",
        f"Time per token from {min(lengths)} to {max(lengths)} cached positions",
        tuple(panels),
        ticks(x, 8),
        "positions in the KV cache",
        bottom + 50,
        marks=_jump_marks(fit.jumps, x) if fit else (),
        legend=tuple(legend),
        hover=hover,
        table=points_table(points, fit),
    )


def points_table(points: Sequence[CurvePoint], fit: CurveFit | None) -> Table:
    return Table(
        "Points of the curve",
        ("sweep", "order", "length", "TPOT ms", "fit ms", "started s", "clock MHz", "°C"),
        tuple(
            (
                point.sweep + 1,
                point.order + 1,
                point.length,
                point.tpot_ms,
                fitted_at(fit, point.length) if fit else None,
                point.started_s,
                point.clock_mhz,
                point.temperature_c,
            )
            for point in sorted(points, key=lambda point: (point.sweep, point.length))
        ),
    )


def residual_panel(
    points: Sequence[CurvePoint], fit: CurveFit, x: Scale, *, top: float, height: float
) -> Panel:
    """Measured minus fitted, in percent of the fit, around a zero line."""
    found = []
    for point in points:
        base = fitted_at(fit, point.length)
        if base:
            found.append((point, 100 * (point.tpot_ms / base - 1)))
    reach = max([abs(value) for _, value in found] + [1.0]) * 1.15
    y = Scale(-reach, reach, top + height, top)
    sweeps = sorted({point.sweep for point in points})
    dots = tuple(
        Dot(
            x(point.length),
            y(value),
            f"s{1 + sweeps.index(point.sweep) % 6}",
            shape_of(sweeps.index(point.sweep)),
            f"sweep {point.sweep + 1}, {point.length} positions: {plain.number(value)} %",
        )
        for point, value in found
    )
    zero = Mark(0, "zero", y=y(0.0))
    return Panel("Residual, % of the fit", top, height, ticks(y, 3), dots=dots, marks=(zero,))


def wall_chart(points: Sequence[CurvePoint], fit: CurveFit | None) -> Chart | None:
    """The same points in the order they were taken: slowing down shows here, not above.

    The upper panel is the ratio to the fit, so the length cancels out; clock and temperature
    follow where the board gives them.
    """
    ordered = sorted(points, key=lambda point: point.started_s)
    times = [point.started_s for point in ordered]
    if fit is None or not fit.fitted or times[-1] <= times[0]:
        return None
    ratios = [
        point.tpot_ms / base if (base := fitted_at(fit, point.length)) else None
        for point in ordered
    ]
    air = 0.02 * (times[-1] - times[0])
    x = x_scale(times[0] - air, times[-1] + air)
    first, y = panel(
        "TPOT over the fit",
        [Series(times, ratios, "s1", "")],
        x,
        top=50,
        height=90,
        y_count=3,
        extra=(0.98, 1.02),
    )
    panels = [dataclasses.replace(first, marks=(Mark(0, "zero", y=y(1.0)),))]
    for title, values, style in (
        ("Clock, MHz", [point.clock_mhz for point in ordered], "s3"),
        ("Temperature, °C", [point.temperature_c for point in ordered], "s2"),
    ):
        if any(value is not None for value in values):
            one, _ = panel(
                title,
                [Series(times, values, style, "")],
                x,
                top=panels[-1].bottom + 34,
                height=64,
                y_count=2,
            )
            panels.append(one)
    starts = [point for point in ordered if point.order == 0]
    marks = tuple(
        Mark(
            min(x(point.started_s), WIDTH - 40), "sweep", f"sweep {point.sweep + 1}", anchor="start"
        )
        for point in starts
    )
    return Chart(
        "walltime",
        "The curve's points in the order they were measured",
        tuple(panels),
        time_ticks(x, 8),
        "since the run began",
        panels[-1].bottom + 50,
        marks=marks + _slowdown_marks(fit.jumps, x),
        table=Table(
            "Points in the order of measurement",
            ("s", "sweep", "length", "TPOT over the fit", "clock MHz", "°C"),
            tuple(
                (p.started_s, p.sweep + 1, p.length, ratio, p.clock_mhz, p.temperature_c)
                for p, ratio in zip(ordered, ratios, strict=True)
            ),
        ),
        hover=hover_data(
            x,
            times,
            lambda index: (
                f"{plain.seconds(times[index])} · {ordered[index].length} positions · "
                f"× {plain.number(ratios[index])} of the fit"
            ),
        ),
    )
