"""The Stress page: speed, memory, heat and clock of a long run against one time axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

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
from dashboards.data import Case, Run
from dashboards.pages.base import Page, Places, missing_note
from dashboards.scales import Scale, time_ticks
from harness.jobs.details import CurvePoint, StressSample, StressTurn
from harness.statistics.throttle import BUSY_PERCENT, THROTTLED, throttled_spans

TABLE_ROWS = 600
EVENTS = ("cancelled", "killed")
MOST_CANCELLED = 24  # marks of them; more would hide what they stand before
EVENTS_SHOWN = 12

Span = tuple[float, float]  # from, to, in seconds since the run began

LEAK_WORDS = {
    "none": "no leak found",
    "leak": "memory keeps growing",
    "too short to tell": "the run is too short to tell a leak",
}


def page(case: Case, run: Run, places: Places) -> Page:
    details = run.details
    samples: Sequence[StressSample] = details["samples"] or ()
    turns: Sequence[StressTurn] = details["turns"] or ()
    bands = throttle_bands(case, samples)
    return Page(
        places.case(case, "stress"),
        "stress.html.jinja",
        {
            "title": f"Stress · {case.board.name}",
            "case": case,
            "active": "stress",
            "run": run,
            "run_link": places.run(run),
            "note": missing_note(run),
            "details": details,
            "chart_of": stress_chart(samples, turns, bands) if samples else None,
            "figures": figures(run),
            "leak": leak_words(run),
            "golden": golden_words(run),
            "bands": tuple(
                f"{plain.seconds(start)} to {plain.seconds(end)}"
                for start, end in bands[:EVENTS_SHOWN]
            ),
            "events": tuple(
                f"{turn.finish} at {plain.seconds(turn.started_s)}, conversation "
                f"{turn.conversation + 1}, turn {turn.turn + 1}"
                for turn in turns
                if turn.finish in EVENTS
            )[:EVENTS_SHOWN],
            "turns": turns_table(turns) if turns else None,
        },
    )


def figures(run: Run) -> tuple[tuple[str, str], ...]:
    d = run.details
    rows = [
        ("Length", d["minutes"], "min"),
        ("Tokens", d["tokens"], ""),
        ("ITL p50", d["itl_p50_ms"], "ms"),
        ("ITL p99", d["itl_p99_ms"], "ms"),
        ("Late over early speed", d["sustained_ratio"], ""),
        ("Memory growth", d["leak_growth_mb"], "MiB"),
        ("Throttled", d["throttled_s"], "s"),
        ("Cancelled", d["cancelled"], ""),
        ("Restarts", d["restarts"], ""),
    ]
    return tuple(
        (name, f"{plain.number(v)} {unit}".strip()) for name, v, unit in rows if v is not None
    )


def leak_words(run: Run) -> str:
    leak, growth, p = run.details["leak"], run.details["leak_growth_mb"], run.details["leak_p"]
    if leak is None:
        return ""
    text = LEAK_WORDS.get(leak, str(leak))
    if growth is not None:
        text += f": {plain.number(growth)} MiB over the run"
        if p is not None:
            text += f" (trend p = {plain.number(p, 2)})"
    return text[0].upper() + text[1:] + "."


def golden_words(run: Run) -> str:
    before, after = run.details["golden_before"], run.details["golden_after"]
    if not before or not after:
        return ""
    if before == after:
        return "The same prompt gives the same tokens before and after the run."
    return "The same prompt gives other tokens after the run than before it."


def throttle_bands(case: Case, samples: Sequence[StressSample]) -> list[Span]:
    """When the clock was down, by the rule of the verdict.

    Empty where the board gives no clocks, and on a virtual board, whose clocks are its host's.
    """
    if case.board.virtual:
        return []
    return throttled_spans(
        [sample.t_s for sample in samples],
        [math.nan if sample.clock_mhz is None else sample.clock_mhz for sample in samples],
        [sample.cpu_percent is None or sample.cpu_percent >= BUSY_PERCENT for sample in samples],
    )


@dataclasses.dataclass(frozen=True)
class Track:
    """One panel of the synced chart."""

    title: str
    style: str
    unit: str
    height: float
    value: Callable[[StressSample], float | None]
    zero: bool = False


HEAT = (
    Track("Temperature, °C", "s2", "°C", 64, lambda s: s.temperature_c),
    Track("Clock, MHz", "s3", "MHz", 64, lambda s: s.clock_mhz),
)
TRACKS = (
    Track("Tokens per second", "s1", "tok/s", 96, lambda s: s.tokens_per_s, zero=True),
    Track("Own memory, MiB", "s4", "MiB", 80, lambda s: s.own_mb),
    Track("Mapped too (RSS), MiB", "s4", "MiB", 64, lambda s: s.rss_mb),
    *HEAT,
    Track("CPU, %", "s6", "% CPU", 56, lambda s: s.cpu_percent, zero=True),
)


def _panels(
    samples: Sequence[StressSample], tracks: Sequence[Track], x: Scale, top: float
) -> list[Panel]:
    times = [sample.t_s for sample in samples]
    panels: list[Panel] = []
    for track in tracks:
        one, _ = panel(
            track.title,
            [Series(times, [track.value(sample) for sample in samples], track.style, track.title)],
            x,
            top=panels[-1].bottom + 36 if panels else top,
            height=track.height,
            zero=track.zero,
            y_count=3 if track.height > 70 else 2,
        )
        panels.append(one)
    return panels


def _known(samples: Sequence[StressSample], tracks: Sequence[Track]) -> list[Track]:
    return [t for t in tracks if any(t.value(sample) is not None for sample in samples)]


def _bars(bands: Sequence[Span], x: Scale, bottom: float) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            x(start),
            24,
            round(max(x(end) - x(start), 1.5), 1),
            bottom - 24,
            "throttle",
            f"throttled from {plain.seconds(start)} to {plain.seconds(end)}",
        )
        for start, end in bands
    )


def _says(samples: Sequence[StressSample], tracks: Sequence[Track]) -> Callable[[int], str]:
    def says(index: int) -> str:
        sample = samples[index]
        parts = [plain.seconds(sample.t_s)]
        for track in tracks:
            value = track.value(sample)
            if value is not None:
                parts.append(f"{plain.number(value)} {track.unit}")
        return " · ".join(parts)

    return says


def stress_chart(
    samples: Sequence[StressSample], turns: Sequence[StressTurn], bands: Sequence[Span] = ()
) -> Chart | None:
    """All tracks that were measured, over one time axis, with ITL and events of the dialogue."""
    tracks = _known(samples, TRACKS)
    if not tracks:
        return None
    end = max([sample.t_s for sample in samples] + [turn.started_s for turn in turns])
    x = x_scale(0.0, end)
    panels = _panels(samples, tracks, x, top=56)
    # The time per token of each turn goes below the speed: stutter shows as spread.
    timed = [turn for turn in turns if turn.tpot_ms is not None]
    if timed:
        panels.append(_turn_panel(timed, x, panels[-1].bottom + 36))
    bottom = panels[-1].bottom
    cancelled = [turn for turn in turns if turn.finish == "cancelled"]
    stride = math.ceil(len(cancelled) / MOST_CANCELLED)
    marks = [_mark(turn, x) for turn in cancelled[:: stride or 1]]
    marks += [_mark(turn, x) for turn in turns if turn.finish == "killed"]
    legend = []
    if cancelled:
        every = f" (every {stride}. of {len(cancelled)})" if stride > 1 else ""
        legend.append(("mark cancelled", f"■ cancelled generation{every}"))
    if any(mark.style == "killed" for mark in marks):
        legend.append(("mark killed", "✕ engine killed and restarted"))
    if bands:
        words = f"throttled: clock below {100 * THROTTLED:g} % of its usual top"
        legend.append(("band throttle", words))
    return Chart(
        "stress",
        f"{', '.join(track.title.lower() for track in tracks)} over {plain.seconds(end)}",
        tuple(panels),
        time_ticks(x, 8),
        "since the run began",
        bottom + 50,
        marks=tuple(marks),
        bands=_bars(bands, x, bottom),
        legend=tuple(legend),
        hover=hover_data(x, [sample.t_s for sample in samples], _says(samples, tracks)),
        table=samples_table(samples).thinned(TABLE_ROWS),
    )


def _mark(turn: StressTurn, x: Scale) -> Mark:
    return Mark(
        x(turn.started_s),
        turn.finish,
        "✕" if turn.finish == "killed" else "■",
        f"{turn.finish} at {plain.seconds(turn.started_s)}: conversation "
        f"{turn.conversation + 1}, turn {turn.turn + 1}",
    )


def samples_table(samples: Sequence[StressSample]) -> Table:
    return Table(
        "Samples",
        ("s", "tok/s", "own MiB", "RSS MiB", "°C", "MHz", "CPU %"),
        tuple(
            (s.t_s, s.tokens_per_s, s.own_mb, s.rss_mb, s.temperature_c, s.clock_mhz, s.cpu_percent)
            for s in samples
        ),
    )


def _turn_panel(turns: Sequence[StressTurn], x: Scale, top: float) -> Panel:
    values: list[float | None] = [turn.tpot_ms for turn in turns]
    body, y = panel(
        "TPOT of each turn, ms",
        [Series([turn.started_s for turn in turns], values, "", "")],
        x,
        top=top,
        height=80,
        y_count=3,
    )
    dots = tuple(
        Dot(
            x(turn.started_s),
            y(turn.tpot_ms),
            "s5",
            "circle",
            f"conversation {turn.conversation + 1}, turn {turn.turn + 1}: "
            f"{plain.number(turn.tpot_ms)} ms, {turn.cached_tokens} positions cached",
        )
        for turn in turns
        if turn.tpot_ms is not None
    )
    return dataclasses.replace(body, lines=(), dots=dots)


def thermal_strip(samples: Sequence[StressSample], bands: Sequence[Span] = ()) -> Chart | None:
    """Only temperature and clock, for the Bring-up page; None where the board gives neither."""
    tracks = _known(samples, HEAT)
    if not tracks:
        return None
    x = x_scale(0.0, max(sample.t_s for sample in samples))
    panels = _panels(samples, tracks, x, top=26)
    table = Table(
        "Temperature and clock",
        ("s", "°C", "MHz"),
        tuple((s.t_s, s.temperature_c, s.clock_mhz) for s in samples),
    ).thinned(120)
    return Chart(
        "thermal",
        "Temperature and clock over the stress run",
        tuple(panels),
        time_ticks(x, 6),
        "since the stress run began",
        panels[-1].bottom + 50,
        bands=_bars(bands, x, panels[-1].bottom),
        legend=(("band throttle", "throttled"),) if bands else (),
        hover=hover_data(x, [sample.t_s for sample in samples], _says(samples, tracks)),
        table=table,
    )


def thermal_of(
    case: Case, samples: Sequence[StressSample], points: Sequence[CurvePoint]
) -> Chart | None:
    """The strip with its bands, from a stress run's samples, or else from a curve's points."""
    if not samples:
        samples = [
            StressSample(
                t_s=point.started_s,
                rss_mb=None,
                cpu_percent=None,  # a point is only taken while the engine works
                temperature_c=point.temperature_c,
                clock_mhz=point.clock_mhz,
                tokens_per_s=None,
            )
            for point in sorted(points, key=lambda point: point.started_s)
        ]
    return thermal_strip(samples, throttle_bands(case, samples)) if samples else None


def turns_table(turns: Sequence[StressTurn]) -> Table:
    return Table(
        "Dialogue turns",
        (
            "conversation",
            "turn",
            "engine",
            "prompt",
            "new",
            "cached",
            "finish",
            "at s",
            "TTFT s",
            "TPOT ms",
        ),
        tuple(
            (
                turn.conversation + 1,
                turn.turn + 1,
                turn.attempt,
                turn.prompt_tokens,
                turn.new_tokens,
                turn.cached_tokens,
                turn.finish,
                turn.started_s,
                turn.ttft_s,
                turn.tpot_ms,
            )
            for turn in turns
        ),
    )
