"""The Farm page: which board, which stage, why, and what next, at one look."""

from __future__ import annotations

import dataclasses
from collections import Counter

from dashboards import plain
from dashboards.charts import Bars
from dashboards.data import Case, Glance, Results, Run
from dashboards.pages.base import Page, Places, blocked_after, glance, key_figure
from dashboards.pages.bringup import ceiling_bars
from harness.verdicts import SEVERITY, Outcome

SLOWEST = 6  # boards whose speed is explained
FASTER = 1.25  # times the curve: then the profile ran as the curve did not
SHOWN = 40  # of a list above or below the matrix, which has everything


@dataclasses.dataclass(frozen=True)
class CellView:
    stage: str
    run: Run | None
    status: str
    figure: str
    link: str
    was: str  # the status in the campaign before where it differs, else ""


@dataclasses.dataclass(frozen=True)
class RowView:
    case: Case
    link: str
    status: str
    cells: tuple[CellView, ...]
    fault: str | None


@dataclasses.dataclass(frozen=True)
class Attention:
    """One thing that somebody has to do something about."""

    case: Case
    run: Run
    link: str  # the page that shows the evidence
    bringup: str
    blocked: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Warned:
    """A stage that passed with something to look at; `reasons` are its checks' sentences."""

    case: Case
    run: Run
    link: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Change:
    case: Case
    stage: str
    before: Run
    after: Run
    better: bool
    link: str
    blocked: tuple[str, ...] = ()  # stages that this change keeps from running


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a board is, what limits it, and where its curve steps."""

    case: Case
    link: str
    end: float
    words: str
    bars: Bars | None
    why: str
    steps: tuple[str, ...]


def page(results: Results, places: Places) -> Page:
    stages = _columns(results)
    rows = tuple(_row(case, stages, places) for case in results.cases)
    counts = Counter(row.status for row in rows)
    order = [*(level.value for level in SEVERITY), "running", "stopped", "none"]
    return Page(
        "index.html",
        "farm.html.jinja",
        {
            "title": "Farm",
            "headline": headline(results.cases),
            "counts": [(status, counts[status]) for status in order if counts[status]],
            "rows": rows,
            "stages": stages,
            "attention": attention(results, places),
            "warned": warned(results, places),
            "crashes": len(results.crashes),
            "changes": changes(results, places),
            "has_before": any(case.earlier for case in results.cases),
            "campaign": results.campaigns[0] if results.campaigns else None,
            "campaigns": results.campaigns[:12],
            "searches": results.searches[:12],
            "boards_of": _boards_of(results),
            "shown": SHOWN,
            "speeds": speeds(results, places),
            "slowest": SLOWEST,
        },
    )


def headline(cases: tuple[Case, ...]) -> str:
    """The farm's state in one sentence."""
    if not cases:
        return "No results yet"
    boards = {case.board.name for case in cases}
    by = Counter(case.status for case in cases)
    if by["pass"] + by["warn"] == len(cases):
        tail = f", {by['warn']} with a warning" if by["warn"] else ""
        if by["warn"] == len(cases) > 1:
            tail = ", each with a warning"
        noun = "board passes" if len(boards) == 1 else "boards pass"
        count = "The" if len(boards) == 1 else "All" if len(boards) > 2 else "Both"
        amount = f" {len(boards)}" if len(boards) > 2 else ""
        return f"{count}{amount} {noun} every stage{tail}"
    parts = []
    for status, one, many in (
        ("error", "could not be tested", "could not be tested"),
        ("fail", "fails", "fail"),
        ("invalid", "gave numbers that cannot be judged", "gave numbers that cannot be judged"),
        ("blocked", "is blocked", "are blocked"),
        ("running", "is running", "are running"),
        ("stopped", "was stopped", "were stopped"),
    ):
        names = sorted({case.board.name for case in cases if case.status == status})
        if len(names) == 1:
            parts.append(f"{names[0]} {one}")
        elif names:
            parts.append(f"{len(names)} boards {many}")
    good = len({case.board.name for case in cases if case.status in ("pass", "warn")})
    if good:
        parts.append(f"{good} {'passes' if good == 1 else 'pass'}")
    return ", ".join(parts)


def speeds(results: Results, places: Places) -> tuple[Speed, ...]:
    """Every board and model with a latency curve that may be judged, the slowest first."""
    found = []
    for case in results.cases:
        run = case.runs.get("curve")
        seen = glance(run) if run is not None else None
        if seen is None or seen.speeds is None:
            continue
        start, end, top = seen.speeds
        if end is None:
            continue
        profile = case.runs.get("profile")
        why = (_profiled(glance(profile), end) if profile is not None else "") or seen.why
        words = f"{plain.number(end)} tok/s at the end of the context"
        if top:
            words += f", {100 * end / top:.0f} % of what its memory allows"
        found.append((end, case, words, start, top, why, seen.steps))
    ordered = sorted(found, key=lambda one: (one[0], one[1].board.name))
    return tuple(
        Speed(
            case,
            places.stage(case, "curve"),
            end,
            words,
            ceiling_bars(
                *(f"speed-{number}", case.board, start, end, top),
                caption=f"Tokens per second, {number}: {case.board.name}",
            ),
            why,
            steps,
        )
        for number, (end, case, words, start, top, why, steps) in enumerate(ordered, 1)
    )


def _profiled(profile: Glance, end: float) -> str:
    """What the profile says limits a board whose curve ended at `end` tok/s, and whether that
    explains it."""
    deep = profile.speeds[1] if profile.speeds is not None else None
    if not profile.why or deep is None or deep < FASTER * end:
        return profile.why
    return (
        f"{profile.why} But so the profile ran, at {plain.number(deep)} tok/s: something else took "
        "time while the curve was measured."
    )


def _columns(results: Results) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for case in results.cases:
        seen.update(dict.fromkeys(case.stages))
    return tuple(seen)


def _row(case: Case, stages: tuple[str, ...], places: Places) -> RowView:
    cells = []
    for stage in stages:
        run = case.runs.get(stage)
        before = case.earlier.get(stage)
        was = ""
        if run is not None and before is not None and before.outcome is not None:
            was = before.status if run.outcome is not None and before.status != run.status else ""
        cells.append(
            CellView(
                stage,
                run,
                run.status if run is not None else "none",
                key_figure(run) if run is not None else "",
                places.stage(case, stage),
                was,
            )
        )
    faults = [run.fault for run in case.runs.values() if run.fault]
    return RowView(
        case, places.case(case), case.status, tuple(cells), faults[0] if faults else None
    )


def attention(results: Results, places: Places) -> tuple[Attention, ...]:
    """The cause of each board's trouble, the worst kind first, with the stages that it blocks."""
    found = []
    for case in results.cases:
        run = case.trouble
        if run is not None:
            found.append(
                Attention(
                    case,
                    run,
                    places.stage(case, run.stage),
                    places.case(case),
                    blocked_after(case, run),
                )
            )
    return tuple(sorted(found, key=lambda item: SEVERITY.index(item.run.outcome or Outcome.PASS)))


def warned(results: Results, places: Places) -> tuple[Warned, ...]:
    """Every newest run that warns, with why, in the order of the matrix."""
    return tuple(
        Warned(
            case,
            run,
            places.stage(case, run.stage),
            run.reasons,
        )
        for case in results.cases
        for stage in case.stages
        if (run := case.runs.get(stage)) is not None and run.outcome is Outcome.WARN
    )


def changes(results: Results, places: Places) -> tuple[Change, ...]:
    """Stages whose outcome differs from the campaign before, setbacks first.

    A stage that became blocked is told with its cause, where that is a change itself.
    """
    found = []
    for case in results.cases:
        cause = case.trouble
        told = (
            cause is not None
            and (before := case.earlier.get(cause.stage)) is not None
            and before.outcome is not None
            and before.outcome != cause.outcome
        )
        for stage, before in case.earlier.items():
            after = case.runs[stage]
            if before.outcome is None or after.outcome is None or before.outcome == after.outcome:
                continue
            if told and cause is not after and after.outcome is Outcome.BLOCKED:
                continue
            better = SEVERITY.index(after.outcome) > SEVERITY.index(before.outcome)
            blocked = blocked_after(case, after) if after is cause else ()
            link = places.stage(case, stage)
            found.append(Change(case, stage, before, after, better, link, blocked))
    return tuple(sorted(found, key=lambda change: change.better))


def _boards_of(results: Results) -> dict[str, tuple[str, ...]]:
    names: dict[str, set[str]] = {campaign.id: set() for campaign in results.campaigns}
    for case in results.cases:
        for run in case.history:
            names.setdefault(run.campaign.id, set()).add(case.board.name)
    return {campaign: tuple(sorted(found)) for campaign, found in names.items()}
