"""What all pages share: where they lie, and the words and figures that recur on them."""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards import plain
from dashboards.data import Case, Glance, Results, Run
from dashboards.searches import Search
from engine.placement import Placement
from harness.jobs.details import CurveJump
from harness.verdicts import Outcome

PAGE_OF_STAGE = {
    "accuracy": "alignment",
    "curve": "curve",
    "stress": "stress",
    "profile": "ops",
}

WORDS = {
    "pass": "Pass",
    "warn": "Warning",
    "fail": "Fail",
    "invalid": "Invalid",
    "error": "Error",
    "blocked": "Blocked",
    "running": "Running",
    "stopped": "Stopped",
    "none": "Not run",
}
# How a search or a comparison ended, which is no state of a run → the colour of one that says so.
TINTS = {
    "named": "pass",
    "minimised": "pass",
    "static-finding": "pass",
    "range": "warn",
    "graded": "warn",
    "environment": "error",
    "board-lost": "error",
    "better": "pass",
    "equivalent": "pass",
    "worse": "fail",
    "unknown": "warn",
    "running": "blocked",
    "stopped": "blocked",
}
MEANINGS = {
    "pass": "every check within the board's budget",
    "warn": "passed, with something to look at",
    "fail": "a finding about the model or the engine",
    "invalid": "measured, but the numbers must not be judged",
    "error": "infrastructure: link, board or set-up, not the product",
    "blocked": "an earlier stage of the same board did not pass",
    "running": "not judged yet",
    "stopped": "ended before a verdict; the same command continues it",
}


def tint(outcome: str) -> str:
    """The colour of a search's or comparison's outcome; one that blames nothing is "invalid"."""
    return TINTS.get(outcome, "invalid")


@dataclasses.dataclass(frozen=True)
class Page:
    """A file of the site. `path` is relative to the site's root, with forward slashes."""

    path: str
    template: str
    values: Mapping[str, Any]

    @property
    def root(self) -> str:
        """The relative way from this page back to the site's root: "" or "../../"."""
        return "../" * self.path.count("/")


class Places:
    """Where each page lies. Names come from boards and models, so they are made safe and unique."""

    def __init__(self, results: Results) -> None:
        self.crash_groups = results.crashes
        self._cases: dict[tuple[str, str, str], str] = {}
        self._runs = {run.id: plain.slug(run.id) for run in results.runs}
        self._case_of_run = {
            run.id: case for case in results.cases for run in (*case.history, *case.runs.values())
        }
        self._nights = results.nights.cases
        self._boards = _unique([one.board for one in results.nights.health])
        taken: set[str] = set()
        for case in results.cases:
            key = (case.board.name, case.model, case.scheme)
            name = "--".join(plain.slug(part) for part in key)
            if name in taken:  # two names that differ only in what a file name cannot hold
                name += "-" + hashlib.sha256("\0".join(key).encode()).hexdigest()[:8]
            taken.add(name)
            self._cases[key] = f"boards/{name}"

    def folder(self, case: Case) -> str:
        return self._cases[case.board.name, case.model, case.scheme]

    def case(self, case: Case, page: str = "index") -> str:
        return posixpath.join(self.folder(case), f"{page}.html")

    def stage(self, case: Case, stage: str) -> str:
        """The page that shows a stage: its own where it has measurements, else the bring-up page at
        that stage."""
        page = PAGE_OF_STAGE.get(stage)
        if page is not None and stage in case.runs and case.runs[stage].measured:
            return self.case(case, page)
        return f"{self.case(case)}#stage-{plain.slug(stage)}"

    def crashes(self) -> str:
        return "crashes.html"

    def run(self, run: Run) -> str:
        return f"runs/{self._runs[run.id]}.html"

    def search(self, search: Search) -> str:
        return f"searches/{plain.slug(search.id)}.html"

    def health(self, board: str = "") -> str:
        """The page of all boards, or of one."""
        return f"health/{self._boards[board]}.html" if board else "health.html"

    def has_history(self, case: Case) -> bool:
        return (case.board.name, case.model, case.scheme) in self._nights

    def csv(self, run: Run, table: str) -> str:
        return f"runs/{self._runs[run.id]}-{plain.slug(table)}.csv"

    def trace(self, run: Run) -> str:
        return f"runs/{self._runs[run.id]}-trace.json"

    def has_run(self, run: Run) -> bool:
        return run.id in self._runs

    def case_of(self, run: Run) -> Case | None:
        return self._case_of_run.get(run.id)


def _unique(names: Sequence[str]) -> dict[str, str]:
    """Name → a file name of its own."""
    found: dict[str, str] = {}
    for name in names:
        slug = plain.slug(name)
        if slug in found.values():
            slug += "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
        found[name] = slug
    return found


def key_figure(run: Run) -> str:
    """The one number that a stage is remembered by; "" where it has none to believe."""
    if run.glance is not None:
        return run.glance.figure
    if run.outcome not in (Outcome.PASS, Outcome.WARN, Outcome.FAIL):
        return ""
    details = run.details
    if run.stage == "tiny" and details["tokens_compared"] is not None:
        if run.outcome in (Outcome.PASS, Outcome.WARN):
            return f"{details['tokens_compared']} tokens equal"
        return f"{details['tokens_compared']} tokens compared"
    if run.stage == "accuracy" and details["logits"] is not None:
        return f"top-1 {100 * details['logits'].top1:.1f} %"
    if run.stage == "ladder" and details["tokens_per_s"] is not None:
        place = Placement(details["threads"], details["cpus"])
        return f"{place}, {plain.number(details['tokens_per_s'])} tok/s"
    if run.stage == "curve" and details["tokens_per_s_start"] is not None:
        start, end = details["tokens_per_s_start"], details["tokens_per_s_end"]
        return f"{plain.number(start)} → {plain.number(end)} tok/s"
    if run.stage == "profile" and details["bottleneck"] is not None:
        return (
            f"{details['bottleneck']}, {plain.number(1e3 / details['depths'][-1].token_ms)} tok/s"
        )
    if run.stage == "stress" and details["minutes"] is not None:
        ratio = details["sustained_ratio"]
        held = f", × {plain.number(ratio)}" if ratio is not None else ""
        return f"{plain.number(details['minutes'])} min{held}"
    return ""


def glance(run: Run) -> Glance:
    """What pages of the whole farm need to know of a run, when its details are gone."""
    if run.glance is not None:
        return run.glance
    warns = run.outcome is Outcome.WARN
    told = Glance(key_figure(run), run.fault, run.measured, run.reasons if warns else ())
    d = run.details
    if run.outcome not in (Outcome.PASS, Outcome.WARN, Outcome.FAIL):
        return told
    if run.stage == "curve":
        speeds = (d["tokens_per_s_start"], d["tokens_per_s_end"], d["ceiling_tokens_per_s"])
        jumps = tuple(map(step_words, d["fit"].jumps)) if d["fit"] is not None else ()
        return dataclasses.replace(told, speeds=speeds, why=d["physics"] or "", steps=jumps)
    if run.stage == "profile":
        deep = 1e3 / d["depths"][-1].token_ms if d["depths"] else None
        return dataclasses.replace(told, why=d["sentence"] or "", speeds=(None, deep, None))
    return told


def step_words(jump: CurveJump) -> str:
    """Where a curve steps, by how much and why, in a few words."""
    change = f"time per token × {plain.number(jump.ratio)}"
    if jump.cause == "throttling":
        at = "at a moment" if jump.started_s is None else f"{plain.seconds(jump.started_s)} in"
        return f"{at}: {change}, throttling"
    return f"{plain.number(jump.length)} positions: {change}, {jump.cause}"


def blocked_after(case: Case, run: Run) -> tuple[str, ...]:
    """The stages that did not run because `run` did not pass."""
    return tuple(
        stage
        for stage in case.stages
        if stage in case.runs and case.runs[stage].outcome is Outcome.BLOCKED and stage != run.stage
    )


def clock_note(run: Run) -> str:
    """What a reader of timings must know about the clocks; "" when they were valid or not told."""
    text = str(run.details["clocks"] or run.clocks)
    if not text or text.startswith("valid"):
        return ""
    if text.startswith("unknown"):
        reason = text.removeprefix("unknown").lstrip(": ") or "this board does not expose them"
        return f"Clocks are unknown, so throttling cannot be ruled out: {reason}."
    return f"Clocks: {text}."


def missing_note(run: Run) -> str:
    """Why a page has gaps; "" when everything is there."""
    if run.outcome is None:
        if run.campaign.over:
            return "This run was stopped before a verdict; the same command continues it."
        return "This run has not been judged yet."
    if run.details.empty:
        if run.outcome is Outcome.BLOCKED:
            return "This stage did not run: an earlier stage of the same board did not pass."
        if run.outcome is Outcome.ERROR:
            return "No measurements: the run ended in an error before it delivered any."
        return "This run left no measurements."
    if run.details.refused:
        return "No measurements: the model was refused before anything of it was loaded."
    if run.details.problems:
        return "Some measurements of this run cannot be read: " + "; ".join(run.details.problems)
    return ""
