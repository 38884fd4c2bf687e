"""Stage 3, curve: time per token against sequence length, up to the designed context.

Where does it jump and why, how fast is it at the *end* of the context, and what limits it?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.measure.curve import CHUNK, FEWEST_POINTS, FEWEST_TOKENS, TRIAL_TOKENS, TTFT_RUNS
from harness.errors import HarnessError
from harness.jobs import failures, prompts
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.budgets import at_least, at_most, gated, memory_within
from harness.jobs.depth import judge_depth
from harness.jobs.details import CurveDetails, CurveFit, CurvePoint
from harness.jobs.golden import golden_count, golden_parameters, judge_golden
from harness.jobs.kernels import judge_kernels
from harness.jobs.memory import Extent
from harness.jobs.pace import slowest_s
from harness.jobs.validity import Validity, conditions, judge_clocks, run_start_ns
from harness.statistics.steps import fit_curve
from harness.statistics.validity import INVALID
from harness.verdicts import Check, Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

MOST_CONTEXT = 2048  # by default; the option goes up to the model's
SWEEPS = 3
TTFT_TOKENS = 128  # of the prompt whose first token is timed
PATIENCE = 4.0  # time budgets: the engine overruns its own where it was too fast at first
SAMPLE_PERIOD_S = 0.25  # a fast board is done in some ten seconds; 30 clock samples are needed
FAR = 2.0  # times the context that was reached; a line is not trusted to fail a board behind it
MIB = float(1 << 20)


class CurveStage:
    """See the module."""

    name = "curve"
    order = 3
    needs_model = True
    timed = True

    def extent(self, context: StageContext) -> Extent:
        return Extent(designed_context(context))

    def plan(self, context: StageContext) -> Plan:
        size = designed_context(context)
        lengths = context.options.curve_lengths
        if lengths and (min(lengths) < 1 or max(lengths) >= size):
            raise HarnessError(
                f"curve lengths from {min(lengths)} to {max(lengths)}",
                expected=f"1 to {size - 1}, within the context of {size}",
                remedy="choose other lengths or a larger context",
            )
        tokens = prompts.text_tokens(context.model, size, context.options.seed)
        budget_s = context.options.curve_seconds
        ttft_tokens = min(TTFT_TOKENS, size // 2)
        parameters: dict[str, object] = {
            "context": size,
            "budget_s": budget_s,
            "sweeps": SWEEPS,
            "ttft_tokens": ttft_tokens,
            "golden": golden_parameters(context),
        }
        if lengths:
            parameters["lengths"] = list(lengths)
        inputs = context.cache / f"curve-{context.run_id}.npz"
        inputs.parent.mkdir(parents=True, exist_ok=True)
        np.savez(inputs, tokens=tokens)
        spec = make_spec(
            context,
            "curve",
            parameters,
            deadline_s=PATIENCE * budget_s
            + slowest_s(context.model, least_tokens(context, lengths)),
            # A golden text, a piece of the prefill or a timed prompt, between two words.
            stall_s=budget_s + slowest_s(context.model, golden_count(context) + CHUNK),
            sample_period_s=SAMPLE_PERIOD_S,
        )
        return Plan(spec, inputs, seconds_hint=budget_s + 10)

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        points = read_points(log)
        fit = fit_curve(
            [point.length for point in points],
            [point.tpot_ms for point in points],
            [point.sweep for point in points],
            [point.started_s for point in points],
        )
        schedule, ttft, prefill = log.data("schedule"), log.data("ttft"), log.data("prefill")
        asked, reached = (int(log.data("context")[name]) for name in ("asked", "reached"))
        start, end = speed_at(points, min), speed_at(points, max)
        validity = judge_clocks(context, conditions(log))
        peak_mb = float(log.data("memory")["peak_rss_mb"] or 0.0)
        bandwidth = log.data("bandwidth")
        budget = context.board.budget
        at_end, reach = end, f"{end:.1f} tokens/s at {reached} positions"
        if reached < asked:  # the budget is one for the designed context
            at_end = min(end, 1e3 / extrapolated_ms(fit, asked))
            reach += f", {at_end:.1f} at {asked} by the fit"
        ttft_s, first_token = time_to_first_token(ttft, prefill, asked)
        far = asked > FAR * reached
        timing = gated(
            disturbance(context, validity, fit),
            (
                _unless_far(far, end, at_least(
                    "tokens_per_s_at_end", at_end, budget.min_tokens_per_s, "tokens/s", reach)),
                _unless_far(far, end / start, at_least(
                    "end_of_context_ratio", at_end / start, budget.min_end_of_context_ratio, "",
                    f"the end of the context runs at {at_end / start:.0%} of its start"
                    + ("" if reached >= asked else f", at {asked} positions by the fit"))),
                at_most("ttft_s", ttft_s, budget.max_ttft_s, "s", first_token),
            ),
        )  # fmt: skip
        checks = (
            *judge_golden(context, log),
            judge_depth(context, log, asked),
            judge_kernels(context, log),
            validity.check,
            *timing,
            memory_within(
                "memory_mb",
                peak_mb,
                peak_mb > 0,
                budget.memory_mb,
                f"peak memory {peak_mb:.0f} MiB with a cache of {asked} positions",
            ),
            _engine_steps(fit),
            _steps_in_time(context, fit),
            _context(asked, reached),
        )
        outcome = worst([check.outcome for check in checks])
        details = CurveDetails(
            points=points,
            fit=fit,
            context=reached,
            tokens_per_s_start=start,
            tokens_per_s_end=end,
            tokens_per_s_middle=speed_at(points, middle_of),
            end_ratio=end / start,
            ttft_s=ttft_s,
            prefill_tokens_per_s=prefill["tokens_per_s"],
            weight_bytes=schedule["weight_bytes"],
            kv_bytes_per_position=schedule["kv_bytes_per_position"],
            bandwidth_gb_s=bandwidth["gb_s"],
            ceiling_tokens_per_s=bandwidth["gb_s"] * 1e9 / schedule["weight_bytes"],
            physics=physics(fit, schedule, bandwidth),
            rss_peak_mb=peak_mb,
            memory_mb=memory_parts(log, schedule, asked, peak_mb),
            clocks=validity.text,
        )
        return Verdict(
            outcome=outcome,
            headline=one_line(_headline(outcome, checks, start, end, reached, fit)),
            checks=checks,
            remedy=_remedy(outcome, checks, log),
            details=details.model_dump(mode="json"),
        )


def designed_context(context: StageContext) -> int:
    """What the option says, else the model's context up to MOST_CONTEXT."""
    largest = context.model.hyperparameters.context
    asked = context.options.context or min(largest, MOST_CONTEXT)
    if asked > largest:
        raise HarnessError(
            f"a context of {asked}",
            expected=f"at most {largest}, which the model {context.model.name} was made for",
        )
    return int(asked)


def least_tokens(context: StageContext, lengths: Sequence[int] | None) -> int:
    """What the engine reads and writes however slow the board is; more only as time allows.

    Chosen lengths are reached whatever that takes.
    """
    fill = max(lengths) + FEWEST_TOKENS if lengths else CHUNK
    points = len(lengths) if lengths else FEWEST_POINTS
    sweeps = SWEEPS * points * FEWEST_TOKENS
    return 2 * golden_count(context) + (1 + TTFT_RUNS) * TRIAL_TOKENS + fill + sweeps


def extrapolated_ms(fit: CurveFit, length: int) -> float:
    """The fitted time of a token at `length`, behind the last point: the last stretch goes on.

    A stretch has at least three points, so its last two lie on one line. Time never falls with
    length: where the fit says so, it is noise.
    """
    (x0, y0), (x1, y1) = sorted(fit.fitted)[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (length - x1)


def time_to_first_token(
    ttft: Mapping[str, Any], prefill: Mapping[str, Any], asked: int
) -> tuple[float, str]:
    """(seconds, clause) for the designed prompt. A slow board timed a shorter one; then the first
    piece of its prefill is as long as the prompt, or else its time is scaled up."""
    wanted = min(TTFT_TOKENS, asked // 2)
    tokens, seconds = int(ttft["prompt_tokens"]), float(ttft["ttft_s"])
    told = f"first token {seconds:.2f} s after a prompt of {tokens} tokens"
    if tokens >= wanted:
        return seconds, told
    if prefill["chunks"][0] >= wanted:
        seconds = float(prefill["seconds"][0])
        return seconds, f"first token {seconds:.2f} s after {prefill['chunks'][0]} tokens, once"
    scaled = seconds * wanted / tokens
    return scaled, f"{told}, {scaled:.2f} s scaled to {wanted}"


def read_points(log: RunLog) -> tuple[CurvePoint, ...]:
    """A point for each visit of a length: the median over its tokens."""
    raw = log.arrays("tokens")
    start_ns = run_start_ns(log)
    seen = conditions(log)
    visits = np.stack([raw["sweep"], raw["order"]], axis=1)  # (n, 2)
    points = []
    for sweep, order in np.unique(visits, axis=0):
        rows = (raw["sweep"] == sweep) & (raw["order"] == order)
        started_s = float(raw["start_ns"][rows][0] - start_ns) / 1e9
        clock, heat = seen.at(started_s)
        points.append(
            CurvePoint(
                sweep=int(sweep),
                order=int(order),
                length=int(raw["length"][rows][0]),
                tpot_ms=float(np.median(raw["duration_ns"][rows])) / 1e6,
                started_s=started_s,
                clock_mhz=clock,
                temperature_c=heat,
            )
        )
    return tuple(points)


def middle_of(lengths: Iterable[int]) -> int:
    """The length in the middle of those that were visited."""
    found = sorted(set(lengths))
    return found[len(found) // 2]


def speed_at(points: Sequence[CurvePoint], which: Any) -> float:
    """Tokens/s at one length (the shortest, by `min`): the median over the sweeps."""
    length = which(point.length for point in points)
    return 1e3 / float(np.median([point.tpot_ms for point in points if point.length == length]))


def disturbance(context: StageContext, validity: Validity, fit: CurveFit) -> str | None:
    """Why no timing of this run may be judged; None when it may."""
    if validity.state == INVALID:
        return validity.text
    # Boards of one machine share its cores: there the fit divides such changes out.
    if context.board.virtual is None and any(jump.cause == "throttling" for jump in fit.jumps):
        return "the speed changed with time"
    return None


def _unless_far(far: bool, measured: float, check: Check) -> Check:
    """A budget that is met where it was measured and missed far behind it is open, not missed."""
    met = isinstance(check.limit, float) and measured >= check.limit
    if not (far and met and check.outcome == Outcome.FAIL):
        return check
    sentence = f"{check.sentence} That is too far to tell: give it more --curve-seconds."
    return check.model_copy(update={"outcome": Outcome.INVALID, "sentence": sentence})


def _engine_steps(fit: CurveFit) -> Check:
    jumps = [jump for jump in fit.jumps if jump.cause != "throttling"]
    sure = [jump for jump in jumps if jump.cause == "engine"]
    if not jumps:
        sentence = f"No step in the curve (model: {fit.model})."
    else:
        told = ", ".join(f"{jump.ratio - 1:+.0%} at {jump.length}" for jump in jumps)
        sentence = f"Time per token jumps: {told}. "
        sentence += (
            "Every sweep shows it at the same length: a tile multiple, a cache size, an allocator."
            if sure
            else "The sweeps do not all show it: measure again before looking for a cause."
        )
    return Check(
        name="engine_steps",
        outcome=Outcome.WARN if sure else Outcome.PASS,
        measured=len(sure),
        limit=0,
        unit="steps",
        sentence=sentence,
    )


def _steps_in_time(context: StageContext, fit: CurveFit) -> Check:
    jumps = [jump for jump in fit.jumps if jump.cause == "throttling"]
    virtual = context.board.virtual is not None
    if not jumps:
        outcome, sentence = Outcome.PASS, "Speed did not change with time."
    else:
        told = ", ".join(f"{jump.ratio - 1:+.0%}" for jump in jumps)
        sentence = f"Time per token changed with time, whatever the length: {told}. "
        if virtual:  # expected there: boards of one machine share its cores
            outcome = Outcome.PASS
            sentence += "Virtual boards share one processor; the change was divided out."
        else:
            outcome = Outcome.INVALID
            sentence += "The board throttled, or something else used it."
    return Check(
        name="steps_in_time", outcome=outcome, measured=len(jumps), limit=None, unit="steps",
        sentence=sentence,
    )  # fmt: skip


def _context(asked: int, reached: int) -> Check:
    return Check(
        name="context",
        outcome=Outcome.PASS if reached >= asked else Outcome.WARN,
        measured=float(reached),
        limit=float(asked),
        unit="positions",
        sentence=f"Measured up to {reached} positions."
        if reached >= asked
        else f"Measured up to {reached} of {asked} positions, where the time budget ended; the "
        "rest is extrapolated. --curve-seconds gives the stage more.",
    )


def physics(fit: CurveFit, schedule: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> str:
    """Intercept and slope against what reading the bytes once would cost, in one sentence."""
    speed = bandwidth["gb_s"] * 1e9  # bytes/s
    weights_ms = schedule["weight_bytes"] / speed * 1e3
    kv_us = schedule["kv_bytes_per_position"] / speed * 1e6
    text = (
        f"At {bandwidth['gb_s']:.1f} GB/s ({bandwidth['what']}) the weights take {weights_ms:.1f} "
        f"ms; a token on an empty cache takes {fit.intercept_ms:.1f} ms, "
        f"{fit.intercept_ms / weights_ms:.1f}× its bytes; "
    )
    if fit.slope_us_per_position <= 0:
        return text + "its time does not grow with the cache."
    return text + (
        f"KV read costs {fit.slope_us_per_position / kv_us:.1f}× its bytes "
        f"({fit.slope_us_per_position:.2f} µs a position)."
    )


def memory_parts(
    log: RunLog, schedule: Mapping[str, Any], positions: int, peak_mb: float
) -> dict[str, float]:
    """Where the peak went, MiB: mapped weights, KV cache, the bare interpreter, the rest."""
    ready = log.ready or {}
    bare = float(ready.get("bare_rss_mb") or 0.0)
    weights = schedule["weight_bytes"] / MIB
    kv = schedule["kv_bytes_per_position"] * positions / MIB
    return {
        "weights": weights,
        "kv": kv,
        "temporary": max(0.0, peak_mb - weights - kv - bare),
        "other": bare,
    }


def _headline(
    outcome: Outcome,
    checks: Sequence[Check],
    start: float,
    end: float,
    reached: int,
    fit: CurveFit,
) -> str:
    if outcome in (Outcome.FAIL, Outcome.INVALID):
        return next(check.sentence for check in checks if check.outcome == outcome)
    speeds = f"{start:.1f} tokens/s at the start, {end:.1f} at {reached} positions"
    if outcome == Outcome.WARN:
        return speeds + "; " + next(c.sentence for c in checks if c.outcome == Outcome.WARN)
    return speeds + ("; no steps" if not fit.jumps else "; no steps of the engine")


REMEDIES: Mapping[str, str] = {
    "golden_right": "run the accuracy stage: it names the op",
    "golden_same": "the engine's answers depend on what ran before: look for state that stays",
    "right_at_depth": "look at what a position indexes: rotation tables, cache slots, the mask",
    "kernels": "use a layout and a scheme that the unit's fast kernels take, or another unit",
    "tokens_per_s_at_end": "a finer scheme reads fewer bytes; a shorter context reads less cache",
    "end_of_context_ratio": "look at attention: its time grows with the cache",
    "ttft_s": "look at prefill: chunk size, threads",
    "memory_mb": "see where it went in the memory table; shorten the context or the scheme",
}
# Where nothing may be judged; the first of these that was not.
UNJUDGED: Mapping[str, str] = {
    "clocks": "cool the board or fix its clocks (governor), then run the stage again",
    "steps_in_time": "stop what else runs on the board, cool it, then run the stage again",
    "golden_same": "run the stage again: it did not tell its last golden generation",
    "memory_mb": "look at /proc/self/status on the board: it told no memory",
    "tokens_per_s_at_end": failures.MORE_TIME["curve"],
    "end_of_context_ratio": failures.MORE_TIME["curve"],
}


def _remedy(outcome: Outcome, checks: Sequence[Check], log: RunLog) -> str | None:
    if outcome not in (Outcome.FAIL, Outcome.INVALID):
        return None
    fault = failures.planted_fault(log)
    if fault:
        return f"a fault is planted on this board (ENGINE_FAULT={fault}): unset it"
    bad = [check.name for check in checks if check.outcome == outcome]
    if outcome == Outcome.FAIL:
        return REMEDIES.get(bad[0])
    return next((remedy for name, remedy in UNJUDGED.items() if name in bad), None)


STAGE = CurveStage()
