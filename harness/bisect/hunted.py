"""What a search over revisions hunts: a crash, wrong results, a slower token, more memory, a test.

Each says what runs on the board, and what its log shows: a result with a signature, or the repeats
of a measurement. A signature must be the same in every revision that has the fault, so it holds no
line numbers and no layer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.bisect.trials import Result
from harness.errors import HarnessError
from harness.jobs import failures, prompts
from harness.jobs.accuracy import STAGE as ACCURACY
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.validity import conditions, judge_clocks
from harness.statistics.validity import MAX_SPREAD, clock_gate
from harness.triage.case import signal_name
from harness.triage.waiting import standing
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

CRASH, ACCURACY_NAME, TPOT, RSS = "crash", "accuracy", "tpot", "rss"
NEW_TOKENS = 32  # of a generation
PROMPT = 12  # ids
REPEATS = 5  # generations of a visit that count, at least; one before them warms up
MOST_REPEATS = 50
VISIT_S = 2.0  # of generations in a visit: what disturbs a board for a moment should not decide
DEADLINE_S = 600.0
STALL_S = 120.0
FEW_CLOCKS = 3  # samples: fewer tell no throttling
_LAYER = re.compile(r"^L\d+\.")
_FRAME = re.compile(r"^(\S+?):\d+ (\S+)$")


@dataclasses.dataclass(frozen=True)
class Shown:
    """What one run showed. `values` are the repeats of a measurement, in the metric's unit.
    `untestable` says why this engine cannot be tried at all."""

    result: Result
    signature: str | None = None
    values: tuple[float, ...] = ()
    untestable: str | None = None
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Hunted:
    """`unit` is that of a measurement, "" for what passes or fails. `between` is the usual spread
    among visits, as a ratio."""

    name: str
    plan: Callable[[StageContext], Plan]
    show: Callable[[StageContext, RunLog], Shown]
    unit: str = ""
    between: float = 0.01
    least: float = 0.01  # the smallest ratio - 1 that counts

    @property
    def measures(self) -> bool:
        return bool(self.unit)


class Pace:
    """How many generations a visit times: as many as were asked for, or else, from the second visit
    on, as many as take VISIT_S."""

    def __init__(self, asked: int | None, tokens: int) -> None:
        self.count = asked or REPEATS
        self._asked, self._tokens = asked, tokens

    def heard(self, shown: Shown) -> Shown:
        """Takes note of how long a generation took."""
        took = self._tokens * statistics.median(shown.values) if shown.values else 0.0
        if self._asked is None and took > 0:
            self.count = min(MOST_REPEATS, max(REPEATS, math.ceil(VISIT_S / took)))
        return shown


def hunted(name: str, *, tokens: int = NEW_TOKENS, repeats: int | None = None) -> Hunted:
    """What `--what` names. Raises HarnessError for anything else: a test is no job."""
    pace = Pace(repeats, tokens)
    kinds = {
        CRASH: Hunted(CRASH, lambda context: generation(context, tokens, 2), _show_crash),
        ACCURACY_NAME: Hunted(ACCURACY_NAME, ACCURACY.plan, _show_accuracy),
        TPOT: Hunted(
            TPOT,
            lambda context: generation(context, tokens, pace.count + 1),
            lambda context, log: pace.heard(_show_tpot(context, log)),
            "s",
        ),
        # The allocator rounds the same way each time: little differs between visits.
        RSS: Hunted(
            RSS, lambda context: generation(context, tokens, 2), _show_rss, "MiB", 0.002, 0.005
        ),
    }
    if name not in kinds:
        raise HarnessError(
            f"--what {name!r}",
            expected=f"one of {', '.join(kinds)}, or a test as pytest names it (FILE::TEST)",
        )
    return kinds[name]


# --- what runs ---------------------------------------------------------------------------------


def generation(
    context: StageContext,
    tokens: int,
    count: int,
    *,
    prompt: int = PROMPT,
    deadline_s: float = DEADLINE_S,
    stall_s: float = STALL_S,
    sample_period_s: float = 1.0,
) -> Plan:
    """The same `tokens` new tokens after a prompt of so many, `count` times, each on an empty
    cache. The prompt is cut to leave room for them in the model's context."""
    most = context.model.hyperparameters.context
    room = max(most // 2, most - tokens)
    ids = [int(token) for token in prompts.text_tokens(context.model, prompt)][:room]
    case = {"prompt": ids, "max_new": min(tokens, most - len(ids)), "sampling": {}}
    parameters: dict[str, object] = {
        "cases": [case] * count, "context": min(most, len(ids) + tokens),
    }  # fmt: skip
    spec = make_spec(
        context,
        "generate",
        parameters,
        deadline_s=deadline_s,
        stall_s=stall_s,
        sample_period_s=sample_period_s,
    )
    return Plan(spec, None, 10.0)


# --- what a log shows --------------------------------------------------------------------------


def _show_crash(context: StageContext, log: RunLog) -> Shown:
    return broken(context, log, CRASH) or Shown(Result.PASS)


def _show_accuracy(context: StageContext, log: RunLog) -> Shown:
    found = broken(context, log, ACCURACY_NAME)
    if found is not None:
        return found
    return shown_of(ACCURACY.judge(context, log))


def shown_of(verdict: Verdict) -> Shown:
    """What a stage's verdict is for a search. Its signature is the op, or else the check."""
    told = {"headline": verdict.headline}
    if verdict.outcome is Outcome.FAIL:
        bad = next(
            (check.name for check in verdict.checks if check.outcome is Outcome.FAIL), "failed"
        )
        return Shown(Result.FAIL, without_layer(verdict.culprit or bad), evidence=told)
    if verdict.outcome in (Outcome.PASS, Outcome.WARN):
        return Shown(Result.PASS, evidence=told)
    return Shown(Result.OTHER, f"{verdict.outcome.value}: {verdict.headline}", evidence=told)


def _show_tpot(context: StageContext, log: RunLog) -> Shown:
    found = broken(context, log, TPOT) or _throttled(context, log)
    if found is not None:
        return found
    turns = counted_turns(log)
    values = tpots_s(turns)
    if not values:
        return Shown(Result.OTHER, "no token was timed", untestable="no token was timed")
    text = ",".join(str(token) for turn in turns for token in turn["tokens"])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Shown(Result.PASS, values=tuple(values), evidence={"tokens": digest})


def _show_rss(context: StageContext, log: RunLog) -> Shown:
    found = broken(context, log, RSS)
    if found is not None:
        return found
    peak = peak_rss_mb(log)
    if peak is None:
        return Shown(Result.OTHER, "no peak", untestable="the run told no peak of its memory")
    return Shown(Result.PASS, values=(peak,))


def counted_turns(log: RunLog) -> list[dict[str, Any]]:
    """The generations of a `generation` that count: the first one warms up."""
    return [turn for case in log.all_data("case") for turn in case][1:]


def tpots_s(turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds per token after the first, of each turn that has any."""
    return [
        (turn["times_s"][-1] - turn["times_s"][0]) / (len(turn["times_s"]) - 1)
        for turn in turns
        if len(turn["times_s"]) > 1
    ]


def peak_rss_mb(log: RunLog) -> float | None:
    """The most that a process of the run had in memory, MiB; None where none told."""
    peaks = [
        float(data["rusage"]["max_rss_mb"])
        for data in log.exits
        if isinstance(data.get("rusage"), dict) and data["rusage"].get("max_rss_mb")
    ]
    return max(peaks, default=None)


def broken(context: StageContext, log: RunLog, stage: str) -> Shown | None:
    """None when the run came to its end. Raises BoardError when the board or the link failed."""
    verdict = failures.judge_failure(context, log, stage)
    if verdict is None:
        return None
    told = {"headline": verdict.headline}
    if verdict.outcome is Outcome.ERROR:
        return Shown(Result.OTHER, verdict.headline, untestable=verdict.headline, evidence=told)
    if verdict.outcome is not Outcome.FAIL:
        return Shown(Result.OTHER, verdict.headline, evidence=told)
    return Shown(Result.FAIL, signature_of(log), evidence=told)


def signature_of(log: RunLog) -> str:
    """Which failure it is: the error with its op or its innermost place, the signal, or where it
    hung."""
    error = failures.first_error(log)
    if error is not None:
        where = error.get("op") or _places(error.get("raised_at") or ())
        return (
            f"{error.get('kind')} in {without_layer(str(where))}" if where else str(error["kind"])
        )
    if log.status in ("hung", "deadline"):
        place = standing(failures.stacks(log))
        return f"hangs in {_places([place])}" if place else "hangs"
    crash = failures.unplanned_exit(log)
    if crash is None:
        return log.status
    if crash.get("signal"):
        return signal_name(crash["signal"])
    return f"exit code {crash.get('code')}"


def without_layer(op: str) -> str:
    """`ffn.down` for `L07.ffn.down`."""
    return _LAYER.sub("", op)


def _places(raised_at: Sequence[str]) -> str:
    """The innermost of some places "decode.py:12 step", without its line."""
    if not raised_at:
        return ""
    found = _FRAME.match(str(raised_at[-1]))
    return f"{found[1]} {found[2]}" if found else str(raised_at[-1])


def _throttled(context: StageContext, log: RunLog) -> Shown | None:
    """INFRA for a visit during which the clocks moved: it says nothing about the engine."""
    found = conditions(log)
    gate = clock_gate(found.clock_mhz)
    if context.board.virtual is not None or gate.samples < FEW_CLOCKS:
        return None
    if gate.spread is None or gate.spread <= MAX_SPREAD:
        return None
    return Shown(Result.INFRA, judge_clocks(context, found).text)
