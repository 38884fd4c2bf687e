"""The Ops page: every op of a token by unit, its bandwidth, the rest, and what limits the board."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dashboards import plain
from dashboards.charts import WIDTH, Bar, Bars, Chart, Panel, Table, bars, x_scale
from dashboards.data import Case, Details, Run
from dashboards.pages.base import Page, Places, clock_note, missing_note
from dashboards.scales import ticks
from harness.jobs.chrome_trace import typical_trace
from harness.jobs.details import ProfiledDepth, ProfileDetails, ProfiledOp

STYLES = {"matrix": "s1", "vector": "s2", "control": "s3"}  # parts of the board
OTHER_PART, BETWEEN = "s5", "s4"
BARS_SHOWN = 12
READ_DIGITS = 4  # of tables that stand on the page itself
BETWEEN_OPS = "between ops"
LANE, LANE_GAP = 30.0, 30.0
VERDICTS = {
    "memory": "Memory bound",
    "compute": "Compute bound",
    "dispatch": "Dispatch or sync bound",
    "waiting": "Waiting",
    "contended": "Disturbed by other processes",
    "fallback": "A slow kernel ran",
}


def page(case: Case, run: Run, places: Places) -> Page:
    d = run.details
    whole = _whole(d)
    return Page(
        places.case(case, "ops"),
        "ops.html.jinja",
        {
            "title": f"Ops · {case.board.name}",
            "case": case,
            "active": "ops",
            "run": run,
            "run_link": places.run(run),
            "note": missing_note(run),
            "clocks": clock_note(run),
            "details": d,
            "verdict": VERDICTS.get(str(d["bottleneck"]), str(d["bottleneck"] or "")),
            "figures": figures(d),
            "shares": share_bars(d),
            "rates": rate_bars(d),
            "parts": parts_table(d),
            "groups": groups_table(d),
            "ops": ops_table(d["ops"]) if d["ops"] else None,
            "token": token_chart(d),
            "meanwhile": meanwhile(d),
            "legend": _parts(d),
            "trace": places.trace(run) if whole is not None else "",
            "files": {places.trace(run): trace_bytes(run, whole)} if whole is not None else {},
        },
    )


def _whole(d: Details) -> ProfileDetails | None:
    """All details as one record; None where some are missing or cannot be read."""
    if d.problems or d["groups"] is None:
        return None
    return ProfileDetails.model_construct(**{name: d[name] for name in ProfileDetails.model_fields})


def trace_bytes(run: Run, details: ProfileDetails) -> bytes:
    """The trace file of one typical token at each depth."""
    about = {"board": run.board.name, "run": run.id, "model": run.model, "scheme": run.scheme}
    document = typical_trace(f"{run.board.name}: {run.model}", details, about)
    return json.dumps(document, separators=(",", ":")).encode()


def _deep(d: Details) -> ProfiledDepth | None:
    depths: Sequence[ProfiledDepth] | None = d["depths"]
    return depths[-1] if depths else None


def figures(d: Details) -> tuple[tuple[str, str], ...]:
    """The page's key figures as (name, value)."""
    depths: Sequence[ProfiledDepth] = d["depths"] or ()
    rows = [
        (f"Token at {depth.position}", f"{plain.number(depth.token_ms)} ms") for depth in depths
    ]
    if depths:
        deep, ceiling = depths[-1], d["bandwidth_gb_s"]
        rows.append(("Reads", f"{plain.number(deep.gb_s)} GB/s"))
        if ceiling:
            rows.append(("Board reads at most", f"{plain.number(ceiling)} GB/s"))
            rows.append(("Of the ceiling", f"{100 * deep.gb_s / ceiling:.0f} %"))
        rows.append(("Between ops", f"{100 * deep.residual_ms / deep.traced_ms:.0f} %"))
    if d["cpu_busy"] is not None:
        rows.append((f"Busy, of {_threads(d['threads'])}", f"{100 * d['cpu_busy']:.0f} %"))
    return tuple(rows)


def _threads(count: int | None) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _style(part: str) -> str:
    return STYLES.get(part, OTHER_PART)


def _parts(d: Details) -> tuple[tuple[str, str], ...]:
    """(style, words) of each part that has ops, and of what lies between them."""
    parts = dict.fromkeys(op.part for op in d["groups"] or ())
    return (*((_style(part), part) for part in parts), (BETWEEN, BETWEEN_OPS)) if parts else ()


def share_bars(d: Details) -> Bars | None:
    """Milliseconds of a token at the deep position, by op, the largest first."""
    groups: Sequence[ProfiledOp] = d["groups"] or ()
    deep = _deep(d)
    if not groups or deep is None:
        return None
    shown, rest = groups[:BARS_SHOWN], groups[BARS_SHOWN:]
    rows = [(op.op, [(_style(op.part), op.part, op.deep_us / 1e3)]) for op in shown]
    if rest:
        total = sum(op.deep_us for op in rest) / 1e3
        rows.append((f"{len(rest)} other ops", [(OTHER_PART, "several", total)]))
    rows.append((BETWEEN_OPS, [(BETWEEN, BETWEEN_OPS, max(0.0, deep.residual_ms))]))
    table = Table(
        "Time of a token by op",
        ("op", "ms", "share"),
        tuple(
            (words, parts[0][2], f"{100 * parts[0][2] / deep.traced_ms:.1f} %")
            for words, parts in rows
        ),
    )
    largest = groups[0]
    return bars(
        "shares",
        f"{largest.op} takes {100 * largest.share:.0f} % of a token",
        rows,
        [],
        say=lambda v: f"{plain.number(v)} ms, {100 * v / deep.traced_ms:.0f} %",
        table=table,
    )


def rate_bars(d: Details) -> Bars | None:
    """GB/s of the ops that read much, against what the board reads at most."""
    groups: Sequence[ProfiledOp] = d["groups"] or ()
    deep, ceiling = _deep(d), d["bandwidth_gb_s"]
    if deep is None:
        return None
    reading = [op for op in groups if op.gb_s is not None and op.bytes >= 0.01 * deep.bytes]
    rows = [
        (op.op, [(_style(op.part), op.part, op.gb_s)])
        for op in sorted(reading, key=lambda op: -op.bytes)[:BARS_SHOWN]
        if op.gb_s is not None
    ]
    if not rows:
        return None
    rows.append(("a token", [("ceiling", "a token", deep.gb_s)]))
    limits = [("the board reads at most", float(ceiling))] if ceiling else []
    table = Table(
        "Read rates by op",
        ("op", "GB/s", "of the ceiling"),
        tuple(
            (words, parts[0][2], f"{100 * parts[0][2] / ceiling:.0f} %" if ceiling else "–")
            for words, parts in rows
        ),
        note="More than the ceiling means that what an op reads lies in a cache.",
    )
    return bars(
        "rates",
        f"a token reads at {plain.number(deep.gb_s)} GB/s",
        rows,
        limits,
        say=lambda v: f"{plain.number(v)} GB/s",
        table=table,
    )


def parts_table(d: Details) -> Table | None:
    """The token by unit: it adds up."""
    groups: Sequence[ProfiledOp] = d["groups"] or ()
    deep = _deep(d)
    if not groups or deep is None:
        return None
    rows: list[tuple[object, ...]] = []
    for part in dict.fromkeys(op.part for op in groups):
        mine = [op for op in groups if op.part == part]
        spent, size = sum(op.deep_us for op in mine) / 1e3, sum(op.bytes for op in mine)
        rate = size / (spent * 1e6) if spent > 0 and size else None
        calls = sum(op.calls for op in mine)
        rows.append((part, calls, spent, _percent(spent / deep.traced_ms), size / 1e6, rate))
    if deep.overlap_ms > 1e-3:  # less is rounding
        share = _percent(-deep.overlap_ms / deep.traced_ms)
        rows.append(("at the same time", None, -deep.overlap_ms, share, None, None))
    share = _percent(deep.residual_ms / deep.traced_ms)
    rows.append((BETWEEN_OPS, None, deep.residual_ms, share, None, None))
    rows.append(
        ("a token, end to end", None, deep.traced_ms, _percent(1.0), deep.bytes / 1e6, deep.gb_s)
    )
    return Table("Ops by unit", PART_COLUMNS, tuple(rows), digits=READ_DIGITS)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


PART_COLUMNS = ("unit", "ops", "ms", "share", "MB", "GB/s")
# What a phone shows without scrolling comes first.
COLUMNS = ("op", "share", "deep µs", "shallow µs", "GB/s", "ceiling", "MB", "calls", "unit", "kind")


def ops_table(ops: Sequence[ProfiledOp], caption: str = "Every op") -> Table:
    """Ops in columns, in the order given."""
    return Table(caption, COLUMNS, tuple(_row(op) for op in ops))


def _row(op: ProfiledOp) -> tuple[object, ...]:
    near = None if op.of_ceiling is None else _percent(op.of_ceiling)
    spent = (_percent(op.share), op.deep_us, op.shallow_us)
    return (op.op, *spent, op.gb_s, near, op.bytes / 1e6 or None, op.calls, op.part, op.kinds)


def groups_table(d: Details) -> Table | None:
    """The ops of all layers together, and the residual, so that the column adds up."""
    groups: Sequence[ProfiledOp] = d["groups"] or ()
    depths: Sequence[ProfiledDepth] = d["depths"] or ()
    if not groups or not depths:
        return None
    shallow, deep = depths[0], depths[-1]
    rows = [_row(op) for op in groups]
    rest = (1e3 * deep.residual_ms, 1e3 * shallow.residual_ms)
    share = _percent(deep.residual_ms / deep.traced_ms)
    rows.append((BETWEEN_OPS, share, *rest, None, None, None, None, "", ""))
    ends = (1e3 * deep.traced_ms, 1e3 * shallow.traced_ms)
    ceiling = d["bandwidth_gb_s"]
    near = _percent(deep.gb_s / ceiling) if ceiling else None
    total = (deep.gb_s, near, deep.bytes / 1e6)
    rows.append(("a token, end to end", _percent(1.0), *ends, *total, None, "", ""))
    return Table("Ops of all layers", COLUMNS, tuple(rows), digits=READ_DIGITS)


def token_chart(d: Details) -> Chart | None:
    """One typical token at the deep position: a lane for each unit."""
    ops: Sequence[ProfiledOp] = d["ops"] or ()
    typical: Sequence[Sequence[tuple[int, float, float]]] = d["typical"] or ()
    spans = [span for span in (typical[-1] if typical else ()) if 0 <= span[0] < len(ops)]
    deep = _deep(d)
    if not spans or deep is None:
        return None
    x = x_scale(0.0, max(start + spent for _, start, spent in spans) / 1e3)
    panels, top = [], 24.0
    for part in dict.fromkeys(op.part for op in ops):
        drawn = tuple(
            Bar(
                round(x(start / 1e3), 2),
                top,
                round(max(x((start + spent) / 1e3) - x(start / 1e3), 0.4), 2),
                LANE,
                _style(part),
                f"{ops[index].op}: {plain.number(spent)} µs",
            )
            for index, start, spent in spans
            if ops[index].part == part
        )
        panels.append(Panel(part, top, LANE, (), bars=drawn))
        top += LANE + LANE_GAP
    table = Table(
        "A typical token",
        ("op", "unit", "starts at µs", "takes µs"),
        tuple((ops[index].op, ops[index].part, start, spent) for index, start, spent in spans),
    )
    words = f"one token at {deep.position} positions, {len(spans)} ops on "
    words += f"{len(panels)} units"
    return Chart(
        "token", words, tuple(panels), ticks(x, 8), "ms into the token", top + 18,
        table=table, width=WIDTH,
    )  # fmt: skip


def meanwhile(d: Details) -> tuple[tuple[str, str], ...]:
    """What the board did meanwhile, as (name, words)."""
    deep = _deep(d)
    if deep is None:
        return ()
    cores = ", ".join(f"{core}: {100 * busy:.0f} %" for core, busy in d["cores"] or ())
    accelerators = ", ".join(f"{name} {100 * busy:.0f} %" for name, busy in d["accelerators"] or ())
    rows: list[tuple[str, str]] = [
        ("Ran on", str(d["kernels"] or "")),
        ("Read ceiling", str(d["bandwidth_what"] or "")),
        ("CPU time of a token", f"{plain.number(deep.cpu_ms)} ms, all threads together"),
        ("Busy cores, all processes", cores or "not told by this board"),
        ("Accelerators", accelerators or "none shows its load"),
        (
            "Page faults a token",
            f"{plain.number(deep.minor_faults)}, of which {plain.number(deep.major_faults)} "
            "waited for storage",
        ),
        (
            "Context switches a token",
            f"{plain.number(deep.voluntary_switches)} waits, "
            f"{plain.number(deep.involuntary_switches)} times another process took the core",
        ),
    ]
    for name, value in deep.counters.items():
        words = name.replace("_", " ").capitalize().replace("Llc", "LLC")
        rows.append((f"{words} a token", plain.number(value, 4)))
    if deep.counters.get("cycles") and "instructions" in deep.counters:
        pace = deep.counters["instructions"] / deep.counters["cycles"]
        rows.append(("Instructions a cycle", plain.number(pace)))
    reasons: dict[str, list[str]] = {}
    for name, reason in d["counters_missing"] or ():
        reasons.setdefault(reason, []).append(name.replace("_", " "))
    rows += [("Not counted", f"{', '.join(names)}: {why}") for why, names in reasons.items()]
    return tuple((name, words) for name, words in rows if words)


def profile_tables(d: Details) -> list[Table]:
    """All tables of a profile, for the data page of its run."""
    found: list[Any] = [groups_table(d), parts_table(d), ops_table(d["ops"]) if d["ops"] else None]
    chart = token_chart(d)
    return [table for table in (*found, chart.table if chart else None) if table is not None]
