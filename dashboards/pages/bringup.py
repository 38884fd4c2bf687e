"""The Bring-up page of one board and model: does it work, what limits it, how to repeat it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from dashboards import engines, plain
from dashboards.acceptance import accept
from dashboards.charts import Bars, Chart, Heat, Table, bars, heat
from dashboards.data import STAGE_QUESTIONS, STAGE_TITLES, Board, Case, Run
from dashboards.pages import planned, stress
from dashboards.pages.alignment import MODES, cell_style, layer_columns, ramp, say, worst_of_columns
from dashboards.pages.base import (
    Page,
    Places,
    blocked_after,
    clock_note,
    key_figure,
    missing_note,
)
from harness.verdicts import Check, Outcome

TOP_OPS = 6
NOTABLE = re.compile(
    "avx2?|fma|f16c|avx512(f|bw|_vnni|_bf16)|avx_vnni|amx_(int8|bf16)"
    "|neon|asimd(hp|dp|fhm)?|fphp|i8mm|bf16|sve2?|svei8mm|sme"
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One rung of the stage ladder."""

    stage: str
    title: str
    question: str
    run: Run | None
    status: str
    figure: str
    link: str | None  # the stage's own page
    data: str | None  # the run's data page
    note: str
    engine: str  # how the engine ran
    telling: tuple[Check, ...]  # what did not pass, and every number against its limit
    quiet: tuple[Check, ...]  # the rest: passed or noted, nothing to compare


def page(case: Case, places: Places) -> Page:
    trouble = case.trouble
    return Page(
        places.case(case),
        "bringup.html.jinja",
        {
            "title": f"{case.board.name} · {case.model}",
            "case": case,
            "active": "index",
            "steps": tuple(_step(case, stage, places) for stage in case.stages),
            "trouble": trouble,
            "trouble_link": places.stage(case, trouble.stage) if trouble else None,
            "blocked": blocked_after(case, trouble) if trouble else (),
            "ceiling": ceiling(case),
            "physics": _detail(case, "curve", "physics"),
            "bottleneck": _detail(case, "profile", "sentence"),
            "memory": memory(case),
            "plan": planned.section(case),
            "cosines": cosines(case),
            "cosine_legend": ramp("cosine"),
            "top_ops": top_ops(case),
            "thermal": thermal(case),
            "facts": board_facts(case),
            "notes": notes(case),
            "campaign": case.newest.campaign,
            "accepted": accept(case, None, places.crash_groups).words,
            "history": tuple(run for run in case.history if places.has_run(run)),
        },
    )


def _detail(case: Case, stage: str, name: str) -> Any:
    run = case.runs.get(stage)
    return run.details[name] if run is not None else None


def _step(case: Case, stage: str, places: Places) -> Step:
    run = case.runs.get(stage)
    link = places.stage(case, stage)
    checks = run.checks if run is not None else ()
    return Step(
        stage,
        STAGE_TITLES.get(stage, stage),
        STAGE_QUESTIONS.get(stage, ""),
        run,
        run.status if run is not None else "none",
        key_figure(run) if run is not None else "",
        link if run is not None and "#" not in link else None,
        places.run(run) if run is not None else None,
        missing_note(run) if run is not None else "",
        engines.line(run) if run is not None else "",
        tuple(check for check in checks if _tells(check)),
        tuple(check for check in checks if not _tells(check)),
    )


def _tells(check: Check) -> bool:
    measured = _is_number(check.measured) and _is_number(check.limit)
    return measured or check.outcome != Outcome.PASS


def ceiling(case: Case) -> Bars | None:
    """Tokens per second reached, against what the board's bandwidth allows and the budget asks."""
    names = ("tokens_per_s_start", "tokens_per_s_end", "ceiling_tokens_per_s")
    start, end, top = (_detail(case, "curve", name) for name in names)
    return ceiling_bars("ceiling", case.board, start, end, top)


def ceiling_bars(
    id: str,
    board: Board,
    start: float | None,
    end: float | None,
    top: float | None,
    caption: str = "Tokens per second",
) -> Bars | None:
    """The same from the numbers, in tokens per second; None where no speed is known."""
    rows = [
        (words, [(style, words, value)])
        for words, style, value in (
            ("Bandwidth allows", "ceiling", top),
            ("Start of context", "s1", start),
            ("End of context", "s2", end),
        )
        if value is not None
    ]
    if start is None and end is None:
        return None
    floor = board.budget.get("min_tokens_per_s")
    limits = [("budget, at least", float(floor))] if _is_number(floor) else []

    def share(value: float) -> str:
        return f"{100 * value / top:.0f} %" if top else "–"

    table = Table(
        caption,
        ("what", "tok/s", "of the ceiling"),
        (
            *((words, parts[0][2], share(parts[0][2])) for words, parts in rows),
            *((words, value, share(value)) for words, value in limits),
        ),
    )
    summary = f"{plain.number(start)} tokens/s at the start of the context"
    if top:
        summary += f", {share(start or 0.0)} of what the bandwidth allows"
    return bars(id, summary, rows, limits, say=lambda v: f"{plain.number(v)} tok/s", table=table)


MEMORY_PARTS = (
    ("weights", "Weights"),
    ("kv", "KV cache"),
    ("temporary", "Temporary"),
    ("other", "Interpreter and other"),
)


def memory(case: Case) -> Bars | None:
    """The engine's memory by purpose, against the budget and the board's memory."""
    found: Mapping[str, float] | None = _detail(case, "curve", "memory_mb")
    if not found:
        return None
    names = dict(MEMORY_PARTS)
    ordered = [key for key in names if key in found] + sorted(set(found) - set(names))
    parts = [
        (f"s{1 + index % 6}", names.get(key, key.replace("_", " ").capitalize()), found[key])
        for index, key in enumerate(ordered)
    ]
    limits = [
        (words, float(value))
        for words, value in (
            ("budget", case.board.budget.get("memory_mb")),
            ("board has", _facts(case).get("memory_mb")),
        )
        if _is_number(value)
    ]
    total = sum(amount for _, _, amount in parts)
    # A board with far more memory than is used would press the parts into a corner.
    drawn = [limit for limit in limits if limit[1] <= 6 * total]
    table = Table(
        "Memory",
        ("part", "MiB"),
        (*((words, amount) for _, words, amount in parts), ("sum", total), *limits),
    )
    return bars(
        "memory",
        f"{plain.mebibytes(total)} in use",
        [("", parts)],
        drawn,
        say=plain.mebibytes,
        table=table,
    )


def cosines(case: Case) -> Heat | None:
    """The lowest cosine of each layer, one row per comparison."""
    ops = _detail(case, "accuracy", "ops")
    if not ops:
        return None
    columns = layer_columns(ops)
    modes = [mode for mode in MODES if any(op.mode == mode for op in ops)]
    names = tuple(name for name, _ in columns)
    worst_ops = worst_of_columns(ops, columns)

    def cell(row: int, column: int) -> tuple[str, str] | None:
        worst = worst_ops.get((modes[row], names[column]))
        if worst is None:
            return None
        return cell_style(worst, "cosine"), f"{modes[row]}, {worst.op}: {say(worst, 'cosine')}"

    return heat(
        "cosines",
        "lowest cosine of each layer against the reference",
        modes,
        names,
        cell,
        left=74,
        row_height=28,
    )


def top_ops(case: Case) -> tuple[Any, ...]:
    """The ops with the largest relative error of their own (local), against the naive baseline."""
    ops = [op for op in _detail(case, "accuracy", "ops") or () if op.mode == "local"]

    def weight(op: Any) -> float:
        if op.rel_l2 is not None:
            return float(op.rel_l2)
        return float("inf") if op.non_finite else -1.0  # -1: the run ended before this op

    order = {"fail": 0, "warn": 1}
    return tuple(sorted(ops, key=lambda op: (order.get(op.outcome, 2), -weight(op), op.op)))[
        :TOP_OPS
    ]


def thermal(case: Case) -> Chart | None:
    """Temperature and clock over the longest run that recorded them."""
    run = case.runs.get("stress")
    samples = run.details["samples"] if run is not None else None
    return stress.thermal_of(case, samples or (), _detail(case, "curve", "points") or ())


def _clocks(case: Case) -> str:
    """What is to be said about the clocks of the timed stages; "" when they were valid."""
    runs = (case.runs.get(stage) for stage in ("curve", "stress"))
    return next((note for run in runs if run is not None and (note := clock_note(run))), "")


def _facts(case: Case) -> Mapping[str, Any]:
    return case.newest.facts or case.board.facts


def board_facts(case: Case) -> tuple[tuple[str, str], ...]:
    """What the board is, as (name, words); only what is known."""
    facts = _facts(case)
    newest = case.newest
    rows: list[tuple[str, Any]] = [
        ("Address", "virtual board on this machine" if case.board.virtual else case.board.host),
        ("Tags", ", ".join(case.board.tags)),
        ("Serial", facts.get("serial")),
        ("Hardware", facts.get("model")),
        ("Machine", facts.get("machine")),
        ("Cores", _cores(facts)),
        ("Features", _features(facts.get("features"))),
        ("Memory", _memory_words(facts)),
        ("System", _join(facts.get("os"), facts.get("kernel"))),
        ("C library", facts.get("libc")),
        ("Python", _python(facts.get("python"))),
        ("Governor", facts.get("governor")),
        ("Thermal zones", _zones(facts.get("thermal_zones"))),
        ("Boot", newest.boot_id or facts.get("boot_id")),
        ("Power mode", newest.power_mode),
        ("Toolchain", newest.toolchain),
        ("Engine", newest.engine_hash[:16]),
        ("Model", newest.model_hash[:16]),
    ]
    return tuple((name, str(value)) for name, value in rows if value not in (None, ""))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _join(*parts: object) -> str:
    return " · ".join(str(part) for part in parts if part)


def _features(value: object) -> str:
    """What kernels are chosen by; the rest is counted. Short lists are told whole."""
    found = _texts(value)
    told = [name for name in found if NOTABLE.fullmatch(name)] if len(found) > 12 else found
    rest = len(found) - len(told)
    words = ", ".join(told)
    return f"{words} and {rest} more" if words and rest else words or (f"{rest}" if rest else "")


def _cores(facts: Mapping[str, Any]) -> str:
    cpus = facts.get("cpus")
    if not isinstance(cpus, (list, tuple)):
        return ""
    kinds = []
    for cpu in cpus:
        known = cpu if isinstance(cpu, Mapping) else {}
        clock = known.get("max_mhz")
        part = str(known.get("part") or "core")
        kinds.append(f"{part}{f' at {plain.number(clock, 4)} MHz' if clock else ''}")
    groups = [(kind, len(list(group))) for kind, group in itertools.groupby(sorted(kinds))]
    return ", ".join(f"{count} × {kind}" for kind, count in groups)


def _memory_words(facts: Mapping[str, Any]) -> str:
    total, free = facts.get("memory_mb"), facts.get("available_mb")
    if not _is_number(total):
        return ""
    tail = f", {plain.mebibytes(free)} available" if _is_number(free) else ""
    return plain.mebibytes(total) + tail


def _python(value: object) -> str:
    if not isinstance(value, Mapping):
        return ""
    return _join(value.get("version"), value.get("path"))


def _zones(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return ""
    zones = [zone for zone in value if isinstance(zone, Mapping)]
    return ", ".join(str(zone.get("kind") or zone.get("name") or "unnamed") for zone in zones)


def notes(case: Case) -> tuple[str, ...]:
    """What a reader must know before believing the numbers."""
    found = []
    for fault in sorted({run.fault for run in case.runs.values() if run.fault}):
        stages = [s for s in case.stages if s in case.runs and case.runs[s].fault == fault]
        words = ", ".join(STAGE_TITLES.get(stage, stage).lower() for stage in stages)
        found.append(f"A fault was planted in this board's engine on purpose: {fault} ({words}).")
    clocks = _clocks(case)
    if clocks:
        found.append(clocks)
    # A profile is asked for by itself, so that of another campaign is nothing to be warned of.
    campaigns = {run.campaign.id for stage, run in case.runs.items() if stage != "profile"}
    if len(campaigns) > 1:
        found.append("The stages come from different campaigns; each shows when it ran.")
    return tuple(found)
