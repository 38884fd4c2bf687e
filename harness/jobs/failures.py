"""Judging a run that did not end well: what the log proves, and never more than that.

Trouble of the board or the link is raised as a BoardError. An engine that crashed, hung or reported
bad numbers is a finding (FAIL). SIGKILL without evidence stays "killed, cause unknown": phones and
some boards kill large processes by policy, so it is never called out of memory by default.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.measure.memory import WORDS
from harness.errors import BoardError
from harness.jobs.memory import REMEDIES
from harness.triage.case import memory_trend as trend_of
from harness.triage.case import signal_name
from harness.triage.classes.raised import INFRASTRUCTURE as INFRASTRUCTURE_ERRORS
from harness.triage.judging import crash_of
from harness.triage.waiting import standing as standing_in
from harness.verdicts import Check, CrashNote, Outcome, Verdict, one_line

if TYPE_CHECKING:
    from harness.jobs.base import StageContext
    from harness.jobs.runlog import RunLog

# An engine is at work when its last word is no older than this, or than some of its own pauses.
QUIET_S, QUIET_FACTOR = 20.0, 2.0
MORE_TIME = {
    "curve": "give it more time with --curve-seconds, or a shorter --context",
    "stress": "give it more time with --stress-minutes",
}
LOG_LINES = 8  # of the engine's own output, quoted as evidence


def judge_failure(context: StageContext, log: RunLog, stage: str) -> Verdict | None:
    """None when the run finished; else a verdict, or BoardError when the board or link failed."""
    board = context.board.name
    if log.status in ("lost", "board-lost", "board-reset"):
        kind = "board-reset" if log.status == "board-reset" else "board-lost"
        raise BoardError(board, kind, log.reason or f"the {stage} run was lost")
    if log.status == "cancelled":
        raise BoardError(board, "engine", f"the {stage} run was cancelled: {log.reason}")
    crash = None
    if log.status != "finished" or log.errors:
        crash = crash_of(log, context.facts.model_dump(mode="json"))
    verdict = _judge_end(context, log, stage, crash)
    if verdict is None or verdict.outcome is not Outcome.FAIL or crash is None:
        return verdict
    culprit = verdict.culprit or crash.op or None
    return verdict.model_copy(update={"crash": crash, "culprit": culprit})


def _judge_end(
    context: StageContext, log: RunLog, stage: str, crash: CrashNote | None
) -> Verdict | None:
    board = context.board.name
    error = first_error(log)
    if error is not None and error.get("kind") == "OverBudget":
        return _judge_refusal(error, board, stage)
    if error is not None:
        return _judge_error(error, log, stage, crash)
    if log.status == "hung":
        return _judge_hang(log, stage)
    if log.status == "deadline":
        return _judge_deadline(log, stage, context)
    data = unplanned_exit(log)
    if data is not None:
        return _judge_exit(data, log, stage, crash)
    if log.status != "finished":
        raise BoardError(
            board,
            "engine",
            f"the {stage} run ended as {log.status!r}: {log.reason}",
            remedy="read supervisor.log and engine.*.log in the run's folder",
        )
    return None


def of_kind(log: RunLog, kind: str) -> list[Mapping[str, Any]]:
    """The data of every event of one kind, in order."""
    return [event.data for event in log.events if event.kind == kind]


def first_error(log: RunLog) -> Mapping[str, Any] | None:
    errors = of_kind(log, "error")
    return errors[0] if errors else None


def unplanned_exit(log: RunLog) -> Mapping[str, Any] | None:
    """The first engine exit that nobody planned and that was not a clean end. One that the
    supervisor brought about is explained by the reason of the run's end."""
    for data in of_kind(log, "engine-exit"):
        if data.get("ended_by") == "supervisor":
            continue
        if not data.get("planned") and (data.get("signal") or data.get("code")):
            return data
    return None


def log_tail(log: RunLog, attempt: object = None) -> str:
    """The last lines that the engine printed, from its log file or from its exit event."""
    for data in reversed(of_kind(log, "engine-exit")):
        for key in ("log_tail", "tail", "output_tail"):
            if data.get(key) and attempt in (None, data.get("attempt")):
                return _last_lines(str(data[key]))
    names = sorted(log.folder.glob("engine.*.log")) if log.folder.is_dir() else []
    wanted = [path for path in names if path.name == f"engine.{attempt}.log"] or names
    if not wanted:
        return ""
    return _last_lines(wanted[-1].read_text(errors="replace"))


def _last_lines(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    # What faulthandler prints begins with the reason and the innermost frames.
    fatal = [n for n, line in enumerate(lines) if line.startswith("Fatal Python error")]
    start = fatal[-1] if fatal else max(0, len(lines) - LOG_LINES)
    return "\n".join(lines[start : start + LOG_LINES])


def memory_trend(log: RunLog) -> str:
    """One sentence about resident memory before the end."""
    return trend_of(of_kind(log, "sample"))


def _judge_error(
    error: Mapping[str, Any], log: RunLog, stage: str, crash: CrashNote | None
) -> Verdict:
    kind, message = str(error.get("kind", "error")), str(error.get("message", ""))
    op, step = error.get("op"), error.get("step")
    infrastructure = kind in INFRASTRUCTURE_ERRORS
    outcome = Outcome.ERROR if infrastructure else Outcome.FAIL
    if kind == "NonFinite":
        headline = f"bad numbers (NaN or Inf) in {op or 'an unknown op'} at step {step}"
        remedy = f"look at {op or 'the op'}: its inputs, its accumulation type, its weights' scales"
    elif infrastructure:
        headline = f"the engine could not run: {kind}: {message}"
        remedy = "check the deployment on the board, then run the same command again"
    elif kind == "MemoryError":
        headline = f"out of memory, said the engine itself: {message}"
        remedy = "use a shorter context or a smaller scheme; " + memory_trend(log)
    elif kind == "ExecutorStuck" and crash is not None:
        headline, remedy = crash.headline, crash.remedy
    else:
        headline = f"the engine stopped: {kind}: {message}"
        frames = "; ".join(str(line) for line in error.get("raised_at", ()))
        remedy = "read the engine's log" + (f"; raised at {frames}" if frames else "")
    sentence = f"{kind}: {message}"
    if error.get("layer") is not None:
        sentence += f" (layer {error['layer']})"
    if kind == "NonFinite" and crash is not None:
        sentence = crash.sentence
    return Verdict(
        outcome=outcome,
        headline=one_line(f"{stage}: {headline}"),
        checks=(
            Check(
                name="engine_ran", outcome=outcome, measured=kind, limit="no error",
                sentence=one_line(sentence, 400),
            ),
        ),
        culprit=str(op) if op and kind == "NonFinite" else None,
        remedy=remedy,
    )  # fmt: skip


def _judge_refusal(error: Mapping[str, Any], board: str, stage: str) -> Verdict:
    """The engine itself found, before it read a weight, that the model does not fit the board."""
    first, _, table = str(error.get("message", "")).partition("\n")
    parts = "; ".join(line.strip() for line in table.splitlines())
    if WORDS["available"] in first:
        raise BoardError(board, "low-memory", f"{first} ({parts})", remedy=REMEDIES["available"])
    return Verdict(
        outcome=Outcome.FAIL,
        headline=one_line(f"{stage}: refused before loading: {first}"),
        checks=(
            Check(
                name="memory_budget", outcome=Outcome.FAIL, measured="refused", limit="fits",
                sentence=f"{first}: {parts}.",
            ),
        ),
        remedy=REMEDIES["memory"],
    )  # fmt: skip


def _judge_exit(
    data: Mapping[str, Any], log: RunLog, stage: str, crash: CrashNote | None
) -> Verdict:
    """An engine that ended by a signal, or with a code and no word: told as its crash is."""
    tail = log_tail(log, data.get("attempt"))
    quoted = f"; it last said: {tail}" if tail else "; it said nothing"
    name = f"exit code {data.get('code')}"
    headline = f"the engine ended with {name} and reported no error"
    sentence, remedy = headline, "read engine.*.log in the run's folder"
    if data.get("signal"):
        name = signal_name(data["signal"])
        headline = sentence = f"the engine died by {name}"
    if crash is not None:
        remedy = crash.remedy
        if data.get("signal"):
            headline, sentence = f"{headline}: {crash.headline}", f"{sentence}: {crash.sentence}"
    if memory_trend(log) not in sentence:
        sentence += f"; {memory_trend(log)}"
    return Verdict(
        outcome=Outcome.FAIL,
        headline=one_line(f"{stage}: {headline}"),
        checks=(
            Check(
                name="engine_survived", outcome=Outcome.FAIL, measured=name,
                limit="no crash", sentence=one_line(sentence + quoted, 1500),
            ),
        ),
        remedy=remedy,
    )  # fmt: skip


def _judge_deadline(log: RunLog, stage: str, context: StageContext) -> Verdict:
    """A board that went on to the end is too slow for the time it was given, which proves nothing
    about the engine. One that fell silent hangs."""
    progress = of_kind(log, "progress")
    last = progress[-1].get("message") if progress else None
    where = f"it last reported: {last}" if last else "it reported no progress"
    silent_s, usual_s = silence(log)
    slow = last is not None and silent_s <= max(QUIET_S, QUIET_FACTOR * usual_s)
    if slow:
        outcome, headline = Outcome.INVALID, f"too slow for the time given; {where}"
        remedy = MORE_TIME.get(stage, "choose a smaller model or scheme for this board")
        sentence = f"It was still getting on: {where} {silent_s:.0f} s before the end."
    else:
        outcome, headline = Outcome.FAIL, f"the engine hangs: not done in time; {where}"
        remedy = f"run the stage alone on {context.board.name} and look where the engine stands"
        sentence = f"Nothing came for {silent_s:.0f} s, before that at most {usual_s:.0f} s."
        sentence += _standing(log)
    return Verdict(
        outcome=outcome,
        headline=one_line(f"{stage}: {headline}"),
        checks=(
            Check(
                name="in_time", outcome=outcome, measured="deadline passed",
                limit="ends by itself",
                sentence=f"The supervisor ended the engine ({log.reason}). {sentence}",
            ),
        ),
        remedy=remedy,
    )  # fmt: skip


def _judge_hang(log: RunLog, stage: str) -> Verdict:
    """The engine said nothing for longer than the slowest board takes, and was ended for that."""
    progress = of_kind(log, "progress")
    last = progress[-1].get("message") if progress else None
    where = f"it last reported: {last}" if last else "it reported no progress"
    silent_s, usual_s = silence(log)
    place = standing_in(stacks(log))
    at = f" in {place}" if place else ""
    return Verdict(
        outcome=Outcome.FAIL,
        headline=one_line(f"{stage}: the engine hangs{at}: silent for {silent_s:.0f} s; {where}"),
        checks=(
            Check(
                name="makes_progress", outcome=Outcome.FAIL, measured="hung",
                limit="a word in time",
                sentence=f"The supervisor ended the engine ({log.reason}); {where}; before that "
                f"it was silent for at most {usual_s:.0f} s.{_standing(log)}",
            ),
        ),
        remedy="read stacks.*.log in the run's folder: where each of its threads stood; a board "
        "that is only slow gets more time with --stall-seconds",
    )  # fmt: skip


def stacks(log: RunLog) -> str:
    """Where the engine stood when the supervisor looked (engine.watchdog); "" if it did not."""
    found = [str(data["stacks"]) for data in of_kind(log, "log") if data.get("stacks")]
    return found[-1] if found else ""


def _standing(log: RunLog) -> str:
    text = stacks(log)
    return f" Where it stood: {one_line(text, 1500)}" if text else ""


def silence(log: RunLog) -> tuple[float, float]:
    """(seconds from the engine's last word to the run's end, its longest pause before that)."""
    spoken = [e.t_ns for e in log.events if e.kind in ("ready", "progress", "data", "array")]
    if not spoken:
        return 0.0, 0.0
    end_ns = log.events[-1].t_ns
    pauses = [later - earlier for earlier, later in itertools.pairwise(spoken)]
    return (end_ns - spoken[-1]) / 1e9, max(pauses, default=0) / 1e9


def planted_fault(log: RunLog) -> str | None:
    """The fault that the engine said was planted in it on purpose, if any."""
    return next((str(data["fault"]) for data in of_kind(log, "ready") if data.get("fault")), None)
