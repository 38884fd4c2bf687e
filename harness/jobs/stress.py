"""Stage 4, stress: minutes of growing dialogues, with cancels, idle gaps and a killed engine.

Does memory leak, does speed sag, does it throttle, and are the answers still the same at the end?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.measure.stress import CANCEL_EVERY
from engine.records import Restart
from harness.errors import HarnessError
from harness.jobs import failures, prompts
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.budgets import memory_within
from harness.jobs.details import StressDetails, StressSample
from harness.jobs.golden import (
    compared,
    golden_count,
    golden_hashes,
    golden_parameters,
    judge_golden,
)
from harness.jobs.memory import Extent
from harness.jobs.pace import slowest_s
from harness.jobs.turns import inter_token_ms, read_turns, token_times
from harness.jobs.validity import Conditions, conditions, run_start_ns
from harness.statistics.drift import MIN_RATIO, Drift, judge_drift
from harness.statistics.leaks import LEAK, MIN_GROWTH_MB, NONE, TOO_SHORT, Leak, judge_leak
from harness.statistics.throttle import throttled_spans
from harness.verdicts import Check, Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

Floats = npt.NDArray[np.float64]

DIALOGUES, TURNS = 4, 8
NEW_TOKENS = 40  # at most, in one answer
LARGEST_CONTEXT = 2048  # by default; the engine takes less where it could not fill that
MOST_SAMPLES = 2000
RESTART_AT = 0.25  # of the run: the second engine then lives long enough to judge a leak


class StressStage:
    """See the module."""

    name = "stress"
    order = 4
    needs_model = True
    timed = True

    def extent(self, context: StageContext) -> Extent:
        return Extent(stress_context(context))

    def plan(self, context: StageContext) -> Plan:
        minutes = stress_minutes(context)
        seconds = 60.0 * minutes
        dialogues = [prompts.dialogue(context.model, 3 * i, TURNS) for i in range(DIALOGUES)]
        longest = max(len(ids) for told in dialogues for ids in (told.first, *told.later))
        arrays = {}
        for index, dialogue in enumerate(dialogues):
            arrays[f"dialogue.{index}.first"] = np.array(dialogue.first, np.int64)
            for turn, ids in enumerate(dialogue.later):
                arrays[f"dialogue.{index}.later.{turn}"] = np.array(ids, np.int64)
        inputs = context.cache / f"stress-{context.run_id}.npz"
        inputs.parent.mkdir(parents=True, exist_ok=True)
        np.savez(inputs, **arrays)  # type: ignore[arg-type]  # numpy's stub counts allow_pickle
        parameters: dict[str, object] = {
            "minutes": minutes,
            "context": stress_context(context),
            "may_shrink": context.options.stress_context is None,
            "max_new": NEW_TOKENS,
            "idle_s": min(2.0, seconds / 100),
            "stop_ids": prompts.stop_ids(context.model),
            "golden": golden_parameters(context),
        }
        spec = make_spec(
            context,
            "stress",
            parameters,
            # Behind the minutes: a golden generation, and the prompt that was being read.
            deadline_s=seconds * 1.2 + slowest_s(context.model, 4 * golden_count(context)),
            stall_s=slowest_s(context.model, golden_count(context) + longest + NEW_TOKENS),
            restarts=(
                Restart(
                    at_s=RESTART_AT * seconds, reason="planned: a killed engine must come back"
                ),
            ),
        )
        return Plan(spec, inputs, seconds_hint=seconds + 10)

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        minutes = stress_minutes(context)
        turns, told = read_turns(log)
        tokens = token_times(log)
        seen = conditions(log)
        samples = read_samples(log, tokens, seen)
        leak = leak_of(log)
        drift = judge_drift(*levelled_speed(log))
        restarts = sum(bool(data.get("planned")) for data in failures.of_kind(log, "engine-exit"))
        cancelled = sum(bool(turn.get("planned_cancel")) for turn in told)
        throttled_s = throttled_seconds(context, seen)
        gaps = inter_token_ms(told)
        golden = golden_hashes(log)
        rss = [float(s["rss_mb"]) for s in log.samples if s.get("rss_mb")]
        peak = max(rss, default=0.0)
        checks = (
            *judge_golden(context, log),
            _restarted(restarts, told, log),
            _limit_met(told),
            _cancels(cancelled, len(told)),
            _leak(leak),
            _drift(context, drift, throttled_s),
            memory_within("memory_mb", peak, bool(rss), context.board.budget.memory_mb,
                          f"peak memory {peak:.0f} MiB"),
            _throttling(context, throttled_s, seen),
        )  # fmt: skip
        outcome = worst([check.outcome for check in checks])
        details = StressDetails(
            minutes=minutes,
            tokens=len(tokens),
            turns=turns,
            samples=samples,
            itl_p50_ms=float(np.percentile(gaps, 50)) if len(gaps) else 0.0,
            itl_p99_ms=float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
            leak=leak.verdict,
            leak_growth_mb=leak.growth_mb,
            leak_p=leak.p,
            sustained_ratio=drift.ratio,
            throttled_s=throttled_s,
            cancelled=cancelled,
            restarts=restarts,
            golden_before=str(golden[0]["hash"]) if golden else "",
            golden_after=str(golden[-1]["hash"]) if compared(golden) else "",
        )
        return Verdict(
            outcome=outcome,
            headline=one_line(_headline(outcome, checks, details)),
            checks=checks,
            remedy=_remedy(outcome, checks, log),
            details=details.model_dump(mode="json"),
        )


def stress_minutes(context: StageContext) -> float:
    return float(context.options.stress_minutes or context.board.stress_minutes)


def stress_context(context: StageContext) -> int:
    """The option, else the model's context up to LARGEST_CONTEXT."""
    largest = int(context.model.hyperparameters.context)
    asked = context.options.stress_context
    if asked is not None and asked > largest:
        raise HarnessError(
            f"a stress context of {asked}",
            expected=f"at most {largest}, which the model {context.model.name} was made for",
        )
    return asked or min(largest, LARGEST_CONTEXT)


def read_samples(log: RunLog, tokens: Floats, seen: Conditions) -> tuple[StressSample, ...]:
    """Board samples with the tokens of the time before each, at most MOST_SAMPLES."""
    counts = np.searchsorted(np.sort(tokens), seen.t_s)  # tokens up to each sample
    rates = np.diff(counts, prepend=0) / np.maximum(np.diff(seen.t_s, prepend=0.0), 1e-3)
    keep = np.unique(
        np.linspace(0, max(0, len(seen.t_s) - 1), min(MOST_SAMPLES, len(seen.t_s))).astype(int)
    )
    raw = log.samples
    found = []
    for index in keep if len(seen.t_s) else ():
        clock, heat = seen.clock_mhz[index], seen.temperature_c[index]
        found.append(
            StressSample(
                t_s=float(seen.t_s[index]),
                rss_mb=raw[index].get("rss_mb"),
                own_mb=own_mb(raw[index]),
                cpu_percent=raw[index].get("cpu_percent"),
                temperature_c=float(heat) if np.isfinite(heat) else None,
                clock_mhz=float(clock) if np.isfinite(clock) else None,
                tokens_per_s=float(rates[index]),
            )
        )
    return tuple(found)


def leak_of(log: RunLog) -> Leak:
    """From the samples; the process that lived longest is judged, a restart gives memory back.

    What the process has for itself counts, in memory or swapped out. Resident memory stands for it
    only where a board cannot tell: it holds the mapped weights too, which come and go with what
    else wants memory.
    """
    start_ns = run_start_ns(log)
    own = any(own_mb(sample) is not None for sample in log.samples)
    value_of = own_mb if own else _resident_mb
    known = [(sample, value) for sample in log.samples if (value := value_of(sample)) is not None]
    return judge_leak(
        np.array([(sample["t_ns"] - start_ns) / 1e9 for sample, _ in known]),
        np.array([value for _, value in known]),
        np.array([int(sample.get("attempt", 0)) for sample, _ in known]),
    )


def own_mb(sample: Mapping[str, Any]) -> float | None:
    """MiB of anonymous memory, swapped out or not; None where the board does not tell."""
    anonymous = sample.get("anonymous_mb")
    return None if anonymous is None else float(anonymous) + float(sample.get("swap_mb") or 0.0)


def _resident_mb(sample: Mapping[str, Any]) -> float | None:
    return float(sample["rss_mb"]) if sample.get("rss_mb") else None


def levelled_speed(log: RunLog) -> tuple[Floats, Floats]:
    """(t_s, tokens/s), one value for each busy second, as if the cache always had one length.

    A token's expected time is a straight line in the cache's length, fitted over the whole run, so
    that a longer dialogue does not look like a slower board. The median of expected over measured
    time stands for a second.
    """
    start_ns = run_start_ns(log)
    gaps, positions, times = [], [], []
    for turn in log.all_data("turn"):
        at_us = np.asarray(turn.get("token_us") or [], np.float64)
        if len(at_us) < 2:
            continue
        gaps.append(np.diff(at_us))
        last = int(turn["cached_tokens"])
        positions.append(np.arange(last - len(at_us) + 2, last + 1, dtype=np.float64))
        times.append((int(turn["start_ns"]) - start_ns) / 1e9 + at_us[1:] / 1e6)
    if not gaps:
        return np.zeros(0), np.zeros(0)
    gap, position, t_s = np.concatenate(gaps), np.concatenate(positions), np.concatenate(times)
    design = np.stack([np.ones_like(position), position], axis=1)
    usual = gap <= 3 * np.median(gap)  # single stalls must not bend the line
    line = np.linalg.lstsq(design[usual], gap[usual], rcond=None)[0]
    speed = np.maximum(design @ line, 1.0) / np.maximum(gap, 1.0) * 1e6 / np.median(gap)
    second = t_s.astype(np.int64)
    busy = np.unique(second)
    middle = np.array([float(np.median(speed[second == value])) for value in busy])
    return busy.astype(np.float64) + 0.5, middle


def throttled_seconds(context: StageContext, seen: Conditions) -> float:
    """Seconds of a busy engine with its clock down. 0 where clocks are unknown, as on a virtual
    board, whose host's they are."""
    if context.board.virtual is not None:
        return 0.0
    return sum(end - start for start, end in throttled_spans(seen.t_s, seen.clock_mhz, seen.busy))


def _restarted(restarts: int, told: Sequence[Mapping[str, Any]], log: RunLog) -> Check:
    after = sum(int(turn["attempt"]) > 0 for turn in told)
    came_back = any(int(data.get("attempt", 0)) > 0 for data in failures.of_kind(log, "ready"))
    outcome = Outcome.FAIL
    if not restarts:
        sentence = "The planned kill of the engine did not happen."
    elif after:
        outcome = Outcome.PASS
        often = "once" if restarts == 1 else f"{restarts} times"
        sentence = f"The engine was killed {often} and answered {after} turns afterwards."
    elif came_back:
        outcome = Outcome.INVALID
        sentence = (
            "The engine was killed and came back, but the run ended before it could answer; "
            "--stress-minutes makes it longer."
        )
    else:
        sentence = "The engine was killed and did not come back."
    return Check(
        name="restart", outcome=outcome, measured=restarts, limit=1, unit="restarts",
        sentence=sentence,
    )  # fmt: skip


def _limit_met(told: Sequence[Mapping[str, Any]]) -> Check:
    full = sum(bool(turn.get("full")) or turn["finish"] == "refused" for turn in told)
    return Check(
        name="context_limit",
        outcome=Outcome.PASS if full else Outcome.WARN,
        measured=full,
        limit=1,
        unit="dialogues",
        sentence=f"{full} dialogues grew until the context was full."
        if full
        else "No dialogue reached the context limit; run longer or with a smaller context.",
    )


def _cancels(cancelled: int, turns: int) -> Check:
    expected = turns >= 2 * CANCEL_EVERY  # an answer may end by itself before it is cancelled
    return Check(
        name="cancelled",
        outcome=Outcome.PASS if cancelled or not expected else Outcome.WARN,
        measured=cancelled,
        limit=None,
        unit="generations",
        sentence=f"{cancelled} of {turns} generations were cancelled midway.",
    )


def _leak(leak: Leak) -> Check:
    return Check(
        name="leak",
        outcome=Outcome.FAIL if leak.verdict == LEAK else Outcome.PASS,
        measured=leak.verdict if leak.growth_mb is None else leak.growth_mb,
        limit=None if leak.verdict == TOO_SHORT else MIN_GROWTH_MB,
        unit="" if leak.growth_mb is None else "MB",
        sentence=f"Leak: {leak.verdict}; {leak.reason}.",
    )


def _drift(context: StageContext, drift: Drift, throttled_s: float) -> Check:
    why = f"; the clock was down for {throttled_s:.0f} s" if throttled_s else ""
    # Boards of one machine share its cores: their speed follows their neighbours' work.
    wrong = Outcome.WARN if context.board.virtual is not None else Outcome.FAIL
    return Check(
        name="sustained_ratio",
        outcome=wrong if drift.drifts else Outcome.PASS,
        measured=drift.ratio,
        limit=None if drift.ratio is None else MIN_RATIO,
        sentence=f"Speed {'sags' if drift.drifts else 'over time'}: {drift.reason}{why}.",
    )


def _throttling(context: StageContext, throttled_s: float, seen: Conditions) -> Check:
    known = bool(np.isfinite(seen.clock_mhz).any()) and context.board.virtual is None
    heat = seen.temperature_c[np.isfinite(seen.temperature_c)]
    hot = f", at most {heat.max():.0f} °C" if len(heat) else ""
    return Check(
        name="throttled",
        outcome=Outcome.WARN if throttled_s else Outcome.PASS,
        measured=throttled_s if known else "clocks unknown",
        limit=None,
        unit="s" if known else "",
        sentence=f"Clocks were down for {throttled_s:.0f} s{hot}."
        if known
        else f"Clocks unknown{hot}.",
    )


def _headline(outcome: Outcome, checks: Sequence[Check], details: StressDetails) -> str:
    if outcome in (Outcome.FAIL, Outcome.INVALID, Outcome.WARN):
        return next(check.sentence for check in checks if check.outcome == outcome)
    leak = "no leak" if details.leak == NONE else f"leak: {details.leak}"
    return (
        f"{details.minutes:g} min, {details.tokens} tokens in {len(details.turns)} turns, "
        f"{details.restarts} restart; same answers, {leak}"
    )


REMEDIES: Mapping[str, str] = {
    "golden_right": "run the accuracy stage: it names the op",
    "golden_same": "the engine's answers depend on what ran before: look for state that stays",
    "restart": "start the engine by hand on the board after a kill -9: look for what stays behind",
    "leak": "look for what each turn keeps: logits, taps, traces, cached arrays",
    "sustained_ratio": "cool the board or lower its clock cap; see the throttle bands",
    "memory_mb": "shorten the context, or choose a smaller scheme",
}
# Where nothing may be judged.
UNJUDGED: Mapping[str, str] = {
    "golden_same": "run the stage again: it did not tell its last golden generation",
    "restart": failures.MORE_TIME["stress"],
    "memory_mb": "look at /proc on the board: it told no memory of the engine",
}


def _remedy(outcome: Outcome, checks: Sequence[Check], log: RunLog) -> str | None:
    if outcome not in (Outcome.FAIL, Outcome.INVALID):
        return None
    fault = failures.planted_fault(log)
    if fault:
        return f"a fault is planted on this board (ENGINE_FAULT={fault}): unset it"
    bad = next(check.name for check in checks if check.outcome == outcome)
    return (REMEDIES if outcome == Outcome.FAIL else UNJUDGED).get(bad)


STAGE = StressStage()
