"""What the pages know: results as frozen records, free of the database.

`dashboards.reading` fills them from the store. Everything may be missing or odd: a board that
could not be reached has no facts, a run that broke has no details.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from dashboards.nights import Nights
from dashboards.searches import Search
from harness.jobs.details import DETAILS
from harness.verdicts import Check, Outcome, Record, worst

NO_NIGHTS = Nights()
STAGES = ("tiny", "accuracy", "curve", "stress")
ORDER = ("tiny", "accuracy", "ladder", "curve", "stress", "profile")
STAGE_TITLES = {
    "tiny": "Tiny model",
    "accuracy": "Accuracy",
    "curve": "Latency curve",
    "stress": "Stress",
    "ladder": "Thread ladder",
    "profile": "Op profile",
}
STAGE_QUESTIONS = {
    "tiny": "Does a two-layer model decode token for token like the reference?",
    "accuracy": "Does every op of the real model agree with the reference?",
    "curve": "How does the time per token grow with the context, and does it jump?",
    "stress": "Does it hold its memory and its speed over a long run?",
    "ladder": "In how many threads, and on which cores, is it fastest?",
    "profile": "Where does a token's time go, and what limits it?",
}


@functools.cache
def _fields(stage: str) -> tuple[tuple[str, bool, TypeAdapter[Any]], ...]:
    """(name, required, validator) of each field of a stage's record; none for an unknown stage."""
    record = cast("type[Record] | None", DETAILS.get(stage))
    fields = record.model_fields.items() if record is not None else ()
    return tuple(
        (name, field.is_required(), TypeAdapter(field.rebuild_annotation()))
        for name, field in fields
    )


class Details:
    """The details of one run, field by field: what is missing or unreadable reads as None.

    Each field is checked against the stage's record on its own, so one bad field of an older or
    broken run does not hide the others. `problems` names those fields.
    """

    def __init__(self, stage: str, raw: Mapping[str, Any] | None) -> None:
        self._values: dict[str, Any] = {}
        self.problems: tuple[str, ...] = ()
        self.empty, self.refused = not raw, False
        if not raw:
            return
        problems = []
        self.refused = set(raw) == {"memory_table"}  # before it started: nothing else is missing
        for name, required, adapter in _fields(stage):
            if name not in raw:
                if required and not self.refused:
                    problems.append(f"{name} is missing")
                continue
            try:
                self._values[name] = adapter.validate_python(raw[name])
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(str(part) for part in (name, *first["loc"]))
                problems.append(f"{where}: {first['msg'].lower()}")
        self.problems = tuple(problems)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def __bool__(self) -> bool:
        return bool(self._values)


@dataclasses.dataclass(frozen=True)
class Glance:
    """What pages of the whole farm say of a run, kept so that they need not read its details."""

    figure: str = ""  # the one number that its stage is remembered by
    fault: str | None = None
    measured: bool = False  # it left details
    reasons: tuple[str, ...] = ()  # why it warns
    # tok/s at the start and the end of the context, and what the memory allows
    speeds: tuple[float | None, float | None, float | None] | None = None
    why: str = ""  # what limits the speed, in a sentence
    steps: tuple[str, ...] = ()  # where the curve steps


@dataclasses.dataclass(frozen=True)
class SeriesFile:
    name: str
    path: str
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Campaign:
    id: str
    kind: str
    command: str  # as one would type it
    outcome: str | None
    started_at: datetime.datetime
    finished_at: datetime.datetime | None
    over: bool = True  # finished, or its process is gone


@dataclasses.dataclass(frozen=True)
class Board:
    name: str
    host: str = ""
    virtual: bool = False
    tags: tuple[str, ...] = ()
    budget: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    id: str
    campaign: Campaign
    board: Board
    model: str
    scheme: str
    stage: str
    state: str  # planned | running | collected | judged
    outcome: Outcome | None
    headline: str
    culprit: str | None
    remedy: str | None
    error_kind: str | None
    checks: tuple[Check, ...]
    details: Details
    started_at: datetime.datetime
    finished_at: datetime.datetime | None
    seconds: float | None = None
    model_hash: str = ""
    engine_hash: str = ""
    toolchain: str = ""
    power_mode: str = ""
    boot_id: str = ""
    attempt: int = 1
    clocks: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    deployment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    series: tuple[SeriesFile, ...] = ()
    ready: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # how it ran
    glance: Glance | None = None  # of a run whose long fields were not read

    @property
    def measured(self) -> bool:
        """Did it leave details?"""
        return self.glance.measured if self.glance is not None else not self.details.empty

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of the checks that warn; its headline where there are none."""
        if self.glance is not None:
            return self.glance.reasons
        found = tuple(check.sentence for check in self.checks if check.outcome == Outcome.WARN)
        return found or (self.headline,)

    @property
    def status(self) -> str:
        """An outcome's name; without one "running", or "stopped" when nobody works on it."""
        if self.outcome is not None:
            return self.outcome.value
        return "stopped" if self.campaign.over else "running"

    @property
    def fault(self) -> str | None:
        """The fault that was planted in this run's engine, as its switch was written."""
        if self.glance is not None:
            return self.glance.fault
        for place in (self.engine, self.ready, self.parameters, self._environment):
            for key in ("fault", "ENGINE_FAULT"):
                if place.get(key):
                    return str(place[key])
        return None

    @property
    def _environment(self) -> Mapping[str, Any]:
        found = self.deployment.get("environment")
        return found if isinstance(found, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One board with one model in one quantisation: a row of the farm matrix.

    `runs` holds the newest run of each stage, `earlier` what the same stage gave in the campaign
    before, where there is one.
    """

    board: Board
    model: str
    scheme: str
    model_hash: str
    runs: Mapping[str, Run]
    earlier: Mapping[str, Run]
    history: tuple[Run, ...] = ()
    # Of the model, as its package says; empty for runs of an older version.
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def stages(self) -> tuple[str, ...]:
        """The known stages, with what was measured for the timed ones before these, then any others
        that this case ran."""
        ordered = [name for name in ORDER if name in STAGES or name in self.runs]
        return (*ordered, *sorted(set(self.runs) - set(ORDER)))

    @property
    def outcome(self) -> Outcome | None:
        """The worst of the newest runs; None while nothing has been judged."""
        found = [run.outcome for run in self.runs.values() if run.outcome is not None]
        return worst(found) if found else None

    @property
    def status(self) -> str:
        """What the whole case is: running, else its worst outcome, else stopped."""
        states = {run.status for run in self.runs.values()}
        if "running" in states:
            return "running"
        if "stopped" in states and self.outcome in (None, Outcome.PASS, Outcome.WARN):
            return "stopped"
        return self.outcome.value if self.outcome is not None else "none"

    @property
    def newest(self) -> Run:
        return max(self.runs.values(), key=lambda run: (run.started_at, run.id))

    @property
    def trouble(self) -> Run | None:
        """The run to look at first: the worst one that is not merely blocked by another."""
        bad = [
            run
            for run in self.runs.values()
            if run.outcome is not None and not run.outcome.lets_next_stage_run
        ]
        causes = [run for run in bad if run.outcome is not Outcome.BLOCKED] or bad
        order = {stage: index for index, stage in enumerate(self.stages)}
        return min(causes, key=lambda run: order[run.stage], default=None)


@dataclasses.dataclass(frozen=True)
class CrashGroup:
    """All crashes of one signature; the words are those of the one seen last."""

    @dataclasses.dataclass(frozen=True)
    class Seen:
        run_id: str
        board: str
        stage: str
        seen_at: datetime.datetime

    hash: str
    name: str
    signature: str
    headline: str
    sentence: str
    remedy: str
    op: str
    facts: tuple[tuple[str, str], ...]
    seen: tuple[Seen, ...]  # the newest first
    command: str = ""  # that shows it again
    rate: str = ""  # "5 of 5"
    recipe: str = ""  # what that runs

    @property
    def boards(self) -> tuple[str, ...]:
        return tuple(sorted({seen.board for seen in self.seen}))

    @property
    def first_seen(self) -> datetime.datetime:
        return min(seen.seen_at for seen in self.seen)

    @property
    def last_seen(self) -> datetime.datetime:
        return max(seen.seen_at for seen in self.seen)


@dataclasses.dataclass(frozen=True)
class Results:
    cases: tuple[Case, ...]
    campaigns: tuple[Campaign, ...]  # the newest first
    runs: tuple[Run, ...]  # every run that has a page
    crashes: tuple[CrashGroup, ...] = ()  # the one seen last first
    searches: tuple[Search, ...] = ()  # the newest first
    nights: Nights = NO_NIGHTS


def cases_of(runs: list[Run]) -> tuple[Case, ...]:
    """Groups runs by board, model and scheme; the newest run of each stage speaks for it.

    A newer campaign that stopped early supersedes only the stages that it touched.
    """
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.started_at, run.id)):
        groups.setdefault((run.board.name, run.model, run.scheme), []).append(run)
    cases = []
    for (_, model, scheme), members in sorted(groups.items()):
        newest: dict[str, Run] = {}
        earlier: dict[str, Run] = {}
        for run in members:
            before = newest.get(run.stage)
            if before is not None and before.campaign.id != run.campaign.id:
                earlier[run.stage] = before
            newest[run.stage] = run
        last = members[-1]
        cases.append(
            Case(last.board, model, scheme, last.model_hash, newest, earlier, tuple(members[::-1]))
        )
    return tuple(cases)
