"""The acceptance lines of a board with a model: five steps, each line with its target, what was
measured, the verdict, and the run that it comes from. Pure: a case in, a report out.

What was not measured is "missing" and never accepted, and so is what a run was too short to tell.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dashboards import plain
from dashboards.data import Case, CrashGroup, Run
from harness.verdicts import Check, Outcome

PASS, FAIL, INVALID, MISSING = "pass", "fail", "invalid", "missing"
WORDS = {PASS: "Accepted", FAIL: "Not accepted", INVALID: "Invalid", MISSING: "Not measured"}
# What a check says instead of a number when it could not tell.
UNTOLD = ("too short to tell", "clocks unknown", "no reading", "unknown")
STAGES = ("tiny", "accuracy", "curve", "stress")  # that an acceptance rests on


@dataclasses.dataclass(frozen=True)
class Line:
    """One acceptance line. `run` is the id of the run that it was measured in."""

    id: str
    name: str
    target: str  # in words; "" where there is none
    measured: str  # in words; "" where nothing was measured
    verdict: str  # pass | fail | invalid | missing
    sentence: str
    warns: bool = False  # accepted, with something to look at
    stage: str = ""
    run: str = ""
    at: datetime.datetime | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    question: str
    lines: tuple[Line, ...]

    @property
    def verdict(self) -> str:
        """The worst of its lines."""
        found = {line.verdict for line in self.lines}
        return next(one for one in (FAIL, INVALID, MISSING, PASS) if one in found or one == PASS)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    steps: tuple[Step, ...]

    @property
    def accepted(self) -> bool:
        return all(line.verdict == PASS for line in self.lines)

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(line for step in self.steps for line in step.lines)

    @property
    def words(self) -> str:
        """Its result in one sentence."""
        total = len(self.lines)
        if self.accepted:
            return f"Accepted: all {total} lines"
        found = [
            f"{count} {words}"
            for verdict, words in (
                (FAIL, "not accepted"),
                (INVALID, "invalid"),
                (MISSING, "not measured"),
            )
            if (count := sum(line.verdict == verdict for line in self.lines))
        ]
        good = sum(line.verdict == PASS for line in self.lines)
        return f"Not accepted: {good} of {total} lines are accepted, {', '.join(found)}"


def accept(
    case: Case, budget: Mapping[str, Any] | None = None, crashes: Sequence[CrashGroup] = ()
) -> Acceptance:
    """Judges a case, whose newest runs must be whole, by `budget` (that of the board if absent)."""
    limits = case.board.budget if budget is None else budget
    asked = _Asked(case, limits)
    return Acceptance(
        (
            Step(
                "Targets and baseline",
                "What must the board reach, and does the engine run there at all?",
                (
                    _targets(limits),
                    asked.check("tokens", "Tiny model, token for token", "tiny", "tokens_equal"),
                    asked.check("baseline-memory", "Memory stable", "tiny", "memory_stable"),
                    _ceiling(asked, limits),
                ),
            ),
            Step(
                "Compression",
                "Is the quantised model still the model?",
                (
                    asked.check("ops", "Every op agrees", "accuracy", "ops_local"),
                    asked.least("cosine", "Lowest cosine", "accuracy", "min_cosine"),
                    asked.most("kl", "Mean KL divergence", "accuracy", "mean_kl", "max_kl"),
                    asked.check("top1", "Top-1 agreement", "accuracy", "top1"),
                    asked.check("text", "Generated text", "accuracy", "text"),
                    asked.check("depth", "Right at depth", "curve", "right_at_depth"),
                ),
            ),
            Step(
                "Runtime tuning",
                "Is it as fast as it must be, from the first position to the last?",
                (
                    asked.check("tuned", "Threads and cores tried", "ladder", "ladder"),
                    asked.check("kernels", "Fast kernels ran", "curve", "kernels"),
                    asked.check("clocks", "Clocks steady", "curve", "clocks"),
                    asked.most("ttft", "Time to first token", "curve", "ttft_s", "max_ttft_s"),
                    asked.least(
                        *("speed", "Speed at the end of the context", "curve"),
                        *("tokens_per_s_at_end", "min_tokens_per_s"),
                    ),
                    asked.least(
                        *("end", "End over start of the context", "curve"),
                        *("end_of_context_ratio", "min_end_of_context_ratio"),
                    ),
                    asked.check("steps", "No step in the curve", "curve", "engine_steps"),
                ),
            ),
            Step(
                "Integration and stress",
                "Does it hold, for hours and through what users do?",
                (
                    asked.most("memory", "Peak memory", "stress", "memory_mb", "memory_mb"),
                    asked.check("leak", "No leak", "stress", "leak"),
                    asked.check("sustained", "Speed held", "stress", "sustained_ratio"),
                    asked.check("throttled", "Not throttled", "stress", "throttled"),
                    asked.check("restart", "Killed and restarted", "stress", "restart"),
                    asked.check("cancelled", "Cancelled midway", "stress", "cancelled"),
                    asked.check("full", "Context filled", "stress", "context_limit"),
                    asked.check("golden", "Same tokens afterwards", "stress", "golden_same"),
                ),
            ),
            Step(
                "Rollout",
                "Is what was accepted what is shipped?",
                (
                    _same_build(case),
                    _no_fault(case),
                    _held_before(case),
                    _no_crash(case, crashes),
                ),
            ),
        )
    )


@dataclasses.dataclass(frozen=True)
class _Asked:
    case: Case
    limits: Mapping[str, Any]

    def check(self, id: str, name: str, stage: str, check: str) -> Line:
        """A line that the stage judged itself."""
        found, missing = self._find(id, name, stage, check)
        if missing is not None or found is None:
            return missing or self._missing(id, name, stage, "")
        verdict = _verdict(found)
        target = _amount(found.limit, found.unit) if found.limit is not None else ""
        return self._line(id, name, stage, found, verdict, target)

    def least(self, id: str, name: str, stage: str, check: str, target: str = "") -> Line:
        return self._against(id, name, stage, check, target or check, "at least", float.__ge__)

    def most(self, id: str, name: str, stage: str, check: str, target: str = "") -> Line:
        return self._against(id, name, stage, check, target or check, "at most", float.__le__)

    def _against(
        self,
        id: str,
        name: str,
        stage: str,
        check: str,
        key: str,
        bound: str,
        good: Callable[[float, float], bool],
    ) -> Line:
        """A line that is judged by the target of today, which may not be that of the run."""
        found, missing = self._find(id, name, stage, check)
        limit = number_of(self.limits.get(key))
        unit = found.unit if found is not None else ""
        target = f"{bound} {_amount(limit, unit)}" if limit is not None else ""
        if missing is not None or found is None:
            line = missing or self._missing(id, name, stage, "")
            return dataclasses.replace(line, target=target)
        value = number_of(found.measured)
        verdict = _verdict(found)
        if limit is None and verdict == PASS:
            line = self._line(id, name, stage, found, MISSING, "")
            words = f"No target: devices.yaml sets no {key} for this board."
            return dataclasses.replace(line, sentence=words)
        if limit is not None and value is not None and verdict in (PASS, FAIL):
            verdict = PASS if good(value, limit) else FAIL
        return self._line(id, name, stage, found, verdict, target)

    def _find(self, id: str, name: str, stage: str, check: str) -> tuple[Check | None, Line | None]:
        """The check, or the line that says why there is none."""
        run = self.case.runs.get(stage)
        if run is None:
            return None, self._missing(id, name, stage, "The stage was not run.")
        for one in run.checks:
            if one.name == check:
                return one, None
        if run.outcome is None:
            why = "The stage has no verdict yet."
        elif run.outcome in (Outcome.BLOCKED, Outcome.ERROR):
            why = f"The stage did not run to its end: {run.headline or run.outcome.value}."
        else:
            why = "The run did not tell."
        return None, self._missing(id, name, stage, why)

    def _missing(self, id: str, name: str, stage: str, why: str) -> Line:
        run = self.case.runs.get(stage)
        where = (run.id, run.started_at) if run is not None else ("", None)
        return Line(id, name, "", "", MISSING, why, False, stage, *where)

    def _line(
        self, id: str, name: str, stage: str, found: Check, verdict: str, target: str
    ) -> Line:
        run = self.case.runs[stage]
        measured = "" if found.measured is None else _amount(found.measured, found.unit)
        warns = found.outcome == Outcome.WARN and verdict == PASS
        return Line(
            *(id, name, target, measured, verdict, found.sentence, warns),
            *(stage, run.id, run.started_at),
        )


def _verdict(check: Check) -> str:
    if check.outcome in (Outcome.INVALID, Outcome.ERROR, Outcome.BLOCKED):
        return INVALID
    if check.outcome == Outcome.FAIL:
        return FAIL
    untold = isinstance(check.measured, str) and check.measured.startswith(UNTOLD)
    return MISSING if check.measured is None or untold else PASS


TARGETS = {
    "memory_mb": "memory",
    "min_tokens_per_s": "tokens per second",
    "max_ttft_s": "time to first token",
    "min_cosine": "cosine",
    "max_kl": "KL divergence",
    "min_end_of_context_ratio": "end over start of the context",
}


def _targets(limits: Mapping[str, Any]) -> Line:
    known = [key for key in TARGETS if number_of(limits.get(key)) is not None]
    missing = [words for key, words in TARGETS.items() if key not in known]
    said = (
        "The board's budget in devices.yaml sets every target."
        if not missing
        else f"The board's budget in devices.yaml says nothing about {', '.join(missing)}."
    )
    return Line(
        "targets",
        "Targets set",
        f"{len(TARGETS)} targets",
        f"{len(known)} of {len(TARGETS)}",
        MISSING if missing else PASS,
        said,
    )


def _ceiling(asked: _Asked, limits: Mapping[str, Any]) -> Line:
    """Can the board's memory deliver the speed that is asked for?"""
    id, name = "ceiling", "Within reach of the memory"
    run = asked.case.runs.get("curve")
    top = number_of(run.details["ceiling_tokens_per_s"]) if run is not None else None
    wanted = number_of(limits.get("min_tokens_per_s"))
    target = f"at least {_amount(wanted, 'tok/s')}" if wanted is not None else ""
    if run is None or top is None:
        why = "The board's read bandwidth was not measured."
        return dataclasses.replace(asked._missing(id, name, "curve", why), target=target)
    bandwidth = number_of(run.details["bandwidth_gb_s"])
    said = f"Reading the weights once per token allows {plain.number(top)} tok/s"
    if bandwidth is not None:
        said += f" at {plain.number(bandwidth)} GB/s"
    verdict = MISSING if wanted is None else PASS if top >= wanted else FAIL
    return Line(
        *(id, name, target, f"{plain.number(top)} tok/s", verdict, said + "."),
        *(False, "curve", run.id, run.started_at),
    )


def _newest(case: Case) -> list[Run]:
    return [case.runs[stage] for stage in STAGES if stage in case.runs]


def _same_build(case: Case) -> Line:
    id, name, target = "build", "One engine, one model", "the same in every stage"
    runs = _newest(case)
    without = [stage for stage in STAGES if stage not in case.runs]
    # A run that never reached its board tells no engine; it is missing by its own lines.
    engines = {run.engine_hash for run in runs if run.engine_hash}
    if without or not engines:
        why = f"Not run: {', '.join(without)}." if without else "No run tells its engine."
        return Line(id, name, target, "", MISSING, why)
    last = max(runs, key=lambda run: run.started_at)
    same = len(engines) == 1
    measured = ", ".join(sorted(engine[:12] for engine in engines))
    said = (
        f"Every stage ran engine {measured} with model {case.model_hash[:12]}."
        if same
        else "The stages ran different engines: repeat them with the one that is shipped."
    )
    verdict = PASS if same else FAIL
    return Line(id, name, target, measured, verdict, said, False, "", last.id, last.started_at)


def _no_fault(case: Case) -> Line:
    id, name, target = "fault", "Nothing planted", "no fault in the engine"
    runs = _newest(case)
    if not runs:
        return Line(id, name, target, "", MISSING, "No stage was run.")
    bad = next((run for run in runs if run.fault), None)
    if bad is not None:
        said = "A fault was planted in this engine on purpose: its results are a test's."
        return Line(
            *(id, name, target, str(bad.fault), FAIL, said, False),
            *(bad.stage, bad.id, bad.started_at),
        )
    return Line(id, name, target, "none", PASS, "No fault was planted in any stage.")


def _held_before(case: Case) -> Line:
    """Twice in a row: one campaign alone may be luck."""
    id, name, target = "again", "Held in two campaigns", "passed now and before"
    before = [case.earlier.get(stage) for stage in STAGES]
    known = [run for run in before if run is not None and run.outcome is not None]
    if len(known) < len(STAGES):
        why = f"An earlier campaign is known of {len(known)} of {len(STAGES)} stages."
        return Line(id, name, target, "", MISSING, why)
    bad = [
        run for run in [*known, *_newest(case)] if run.outcome not in (Outcome.PASS, Outcome.WARN)
    ]
    last = max(known, key=lambda run: run.started_at)
    if bad:
        said = f"The {bad[0].stage} stage of one of them ended as {bad[0].status}."
        where = (bad[0].stage, bad[0].id, bad[0].started_at)
        return Line(id, name, target, "not in both", FAIL, said, False, *where)
    said = "Every stage passed in this campaign and in the one before."
    return Line(id, name, target, "both", PASS, said, False, "", last.id, last.started_at)


def _no_crash(case: Case, crashes: Sequence[CrashGroup]) -> Line:
    id, name, target = "crashes", "No crash", "none in these runs"
    runs = {run.id: run for run in _newest(case)}
    if len(runs) < len(STAGES):
        return Line(id, name, target, "", MISSING, "Not every stage was run.")
    for group in crashes:
        for seen in group.seen:
            if seen.run_id in runs:
                run = runs[seen.run_id]
                where = (run.stage, run.id, run.started_at)
                return Line(id, name, target, group.name, FAIL, group.headline, False, *where)
    return Line(id, name, target, "none", PASS, "No engine crashed in these runs.")


def number_of(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _amount(value: object, unit: str) -> str:
    number = number_of(value)
    if number is None:
        return plain.visible(str(value))
    if number == 1 and unit.isalpha() and len(unit) > 4:
        unit = unit.removesuffix("s")  # 1 restart
    return f"{plain.number(number)} {unit}".strip()


def as_json(case: Case, found: Acceptance) -> dict[str, Any]:
    """The report for programs. Times are ISO 8601, in UTC."""

    def told(line: Line) -> dict[str, Any]:
        at = line.at.astimezone(datetime.UTC).isoformat() if line.at is not None else None
        return {**dataclasses.asdict(line), "at": at}

    return {
        "board": case.board.name,
        "model": case.model,
        "scheme": case.scheme,
        "model_hash": case.model_hash,
        "accepted": found.accepted,
        "result": found.words,
        "command": case.newest.campaign.command,
        "steps": [
            {"name": step.name, "verdict": step.verdict, "lines": [told(o) for o in step.lines]}
            for step in found.steps
        ],
    }
