"""The acceptance report of one board and model: one file to mail, with all that it needs inside."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
from pathlib import Path

from dashboards.acceptance import FAIL, INVALID, MISSING, PASS, WORDS, Acceptance, accept
from dashboards.charts import Chart
from dashboards.data import STAGE_TITLES, Case
from dashboards.pages import bringup, curve, stress
from dashboards.pages.base import Page, Places

STYLES = Path(__file__).parent.parent / "static"
ICONS = {PASS: "pass", FAIL: "fail", INVALID: "invalid", MISSING: "none"}


@functools.cache
def style() -> str:
    """The style sheets that stand in the file itself."""
    return "".join((STYLES / name).read_text() for name in ("style.css", "report.css"))


@functools.cache
def style_source() -> str:
    """What a Content-Security-Policy allows of it: this text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()}'"


def policy() -> str:
    """Nothing is loaded and nothing runs; only the style in the file applies."""
    return (
        f"default-src 'none'; style-src {style_source()}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def page(case: Case, places: Places, found: Acceptance | None = None) -> Page:
    """`found` is what was judged by other targets than those of the last run."""
    accepted = accept(case, None, places.crash_groups) if found is None else found
    return Page(
        places.case(case, "report"),
        "report.html.jinja",
        {
            "title": f"Acceptance · {case.board.name} · {case.model}",
            "case": case,
            "found": accepted,
            "icons": ICONS,
            "verdict_words": WORDS,
            "ceiling": bringup.ceiling(case),
            "memory": bringup.memory(case),
            "physics": case.runs["curve"].details["physics"] if "curve" in case.runs else None,
            "curve_chart": _bare(_curve(case)),
            "stress_chart": _bare(_stress(case)),
            "facts": bringup.board_facts(case),
            "notes": bringup.notes(case),
            "commands": _commands(case),
            "style": style(),
            "own_policy": policy(),
        },
    )


def _curve(case: Case) -> Chart | None:
    details = case.runs["curve"].details if "curve" in case.runs else None
    return (
        curve.curve_chart(details["points"], details["fit"])
        if details and details["points"]
        else None
    )


def _stress(case: Case) -> Chart | None:
    details = case.runs["stress"].details if "stress" in case.runs else None
    if not details or not details["samples"]:
        return None
    bands = stress.throttle_bands(case, details["samples"])
    return stress.stress_chart(details["samples"], details["turns"] or (), bands)


def _bare(chart: Chart | None) -> Chart | None:
    """Without what a script would show and without its table: the acceptance lines have the
    numbers, and the run's data page has them all."""
    return dataclasses.replace(chart, hover="", table=None) if chart is not None else None


def _commands(case: Case) -> tuple[tuple[str, str], ...]:
    """(stages, command) of each campaign that a stage comes from."""
    stages: dict[str, list[str]] = {}
    for stage in case.stages:
        if stage in case.runs and case.runs[stage].campaign.command:
            title = STAGE_TITLES.get(stage, stage)
            stages.setdefault(case.runs[stage].campaign.command, []).append(title)
    return tuple((", ".join(titles), command) for command, titles in stages.items())
