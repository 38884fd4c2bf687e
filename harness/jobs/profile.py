"""The op profile: where a token's time goes, at what bandwidth, and what limits the board.

Not a stage of the bring-up but a measurement that somebody asks for: `harness profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.measure.curve import CHUNK, SHORTEST
from engine.measure.profile import FEWEST_TOKENS, ROUNDS
from harness.errors import HarnessError
from harness.jobs import failures, prompts
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.bottleneck import Bottleneck, Evidence, bottleneck
from harness.jobs.curve import designed_context
from harness.jobs.details import ProfiledDepth, ProfileDetails, ProfiledOp
from harness.jobs.golden import golden_count, golden_parameters, judge_golden
from harness.jobs.kernels import engine_words, fallbacks, judge_kernels
from harness.jobs.memory import Extent
from harness.jobs.op_times import Timeline, Times, bytes_read, group_of, timeline, times_of
from harness.jobs.pace import slowest_s
from harness.jobs.validity import conditions, judge_clocks
from harness.statistics.validity import INVALID
from harness.verdicts import Check, Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

PATIENCE = 4.0  # time budgets
SAMPLE_PERIOD_S = 0.25
HEAVY_TRACE = 1.10  # a traced token against one without: beyond it the table is told to be skewed


class Profile:
    """See the module. It has the shape of a stage, and runs like one."""

    name = "profile"
    order = 5
    needs_model = True
    timed = True

    def extent(self, context: StageContext) -> Extent:
        return Extent(designed_context(context))

    def plan(self, context: StageContext) -> Plan:
        size = designed_context(context)
        budget_s = context.options.profile_seconds
        inputs = context.cache / f"profile-{context.run_id}.npz"
        inputs.parent.mkdir(parents=True, exist_ok=True)
        np.savez(inputs, tokens=prompts.text_tokens(context.model, size, context.options.seed))
        parameters: dict[str, object] = {
            "context": size,
            "budget_s": budget_s,
            "golden": golden_parameters(context),
        }
        tokens = 2 * golden_count(context) + CHUNK + 4 * ROUNDS * FEWEST_TOKENS
        spec = make_spec(
            context,
            "profile",
            parameters,
            deadline_s=PATIENCE * budget_s + slowest_s(context.model, tokens),
            stall_s=budget_s + slowest_s(context.model, golden_count(context) + CHUNK),
            sample_period_s=SAMPLE_PERIOD_S,
        )
        return Plan(spec, inputs, seconds_hint=budget_s + 10)

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        validity = judge_clocks(context, conditions(log))
        details = details_of(log, validity.text)
        reached, asked = (int(log.data("context")[name]) for name in ("reached", "asked"))
        checks = (
            *judge_golden(context, log),
            judge_kernels(context, log),
            validity.check,
            _found(details, validity.state == INVALID),
            _adds_up(details),
            _trace_cost(details),
            _depth(reached, asked),
        )
        outcome = worst([check.outcome for check in checks])
        first = next(check for check in checks if check.outcome == outcome)
        told = outcome in (Outcome.PASS, Outcome.WARN)
        return Verdict(
            outcome=outcome,
            headline=one_line(_what(details.sentence) if told else first.sentence),
            checks=checks,
            remedy=_remedy(outcome, first, details),
            details=details.model_dump(mode="json"),
        )


def _what(sentence: str) -> str:
    """What limits the token, without the numbers behind it: "Compute bound: 1 thread 99% busy"."""
    return sentence.partition(";")[0].partition(". ")[0].removesuffix(".")


def details_of(log: RunLog, clocks: str) -> ProfileDetails:
    """Everything that is kept of a run that ended well."""
    program, activity = log.data("program"), log.data("activity")
    bandwidth, ready = log.data("bandwidth"), log.ready or {}
    line, times = read_times(log)
    ceiling = float(bandwidth["gb_s"])
    ops = op_rows(program, times, ceiling)
    groups = tuple(sorted(group_rows(ops, times, ceiling), key=lambda row: -row.deep_us))
    depths = tuple(
        _depth_row(program, one, told) for one, told in zip(times, activity["depths"], strict=True)
    )
    seen = evidence(program, activity, depths[-1], groups, ceiling, ready)
    verdict: Bottleneck = bottleneck(seen)
    return ProfileDetails(
        bottleneck=verdict.kind,
        sentence=verdict.sentence,
        advice=verdict.advice,
        groups=groups,
        ops=ops,
        depths=depths,
        weight_bytes=int(program["weight_bytes"]),
        bandwidth_gb_s=ceiling,
        bandwidth_what=str(bandwidth["what"]),
        threads=seen.threads,
        cpu_busy=seen.cpu_busy,
        cores=tuple((int(core), float(busy)) for core, busy in activity["cores"].items()),
        accelerators=tuple(sorted(seen.accelerators.items())),
        counters_missing=tuple(sorted(activity["counters_missing"].items())),
        kernels=engine_words(ready),
        kv_bytes_per_position=int(program["kv_bytes_per_position"]),
        typical=tuple(_typical(line, one) for one in times),
        clocks=clocks,
    )


def read_times(log: RunLog) -> tuple[Timeline, tuple[Times, ...]]:
    """The traced tokens, and their times at both depths. Raises HarnessError."""
    tokens, trace = log.arrays("tokens"), log.arrays("trace")["rows"]
    count = len(log.data("program")["ops"])
    try:
        line = timeline(tokens, trace)
        return line, tuple(times_of(tokens, line, depth, count) for depth in (0, 1))
    except ValueError as error:
        raise HarnessError(
            str(error),
            where=f"run {log.run_id}",
            expected="a trace of the tokens that were timed",
            remedy="profile the board again",
        ) from error


def op_rows(
    program: Mapping[str, Any], times: Sequence[Times], ceiling: float
) -> tuple[ProfiledOp, ...]:
    """A row for each op of the program, in its order."""
    shallow, deep = times
    return tuple(
        _row(
            str(op["id"]),
            "+".join(op["kinds"]),
            str(op["part"]),
            1,
            1e3 * float(shallow.ops[index]),
            1e3 * float(deep.ops[index]),
            bytes_read(op, float(program["kv_bytes"]), deep.position),
            deep,
            ceiling,
        )
        for index, op in enumerate(program["ops"])
    )


def group_rows(
    ops: Sequence[ProfiledOp], times: Sequence[Times], ceiling: float
) -> list[ProfiledOp]:
    """The same op of all layers as one row."""
    groups: dict[str, list[ProfiledOp]] = {}
    for op in ops:
        groups.setdefault(group_of(op.op), []).append(op)
    return [
        _row(
            name,
            rows[0].kinds,
            rows[0].part,
            len(rows),
            sum(row.shallow_us for row in rows),
            sum(row.deep_us for row in rows),
            sum(row.bytes for row in rows),
            times[-1],
            ceiling,
        )
        for name, rows in groups.items()
    ]


def _row(
    name: str,
    kinds: str,
    part: str,
    calls: int,
    shallow_us: float,
    deep_us: float,
    size: int,
    deep: Times,
    ceiling: float,
) -> ProfiledOp:
    rate = size / (deep_us * 1e3) if deep_us > 0 and size else None
    return ProfiledOp(
        op=name,
        kinds=kinds,
        part=part,
        calls=calls,
        shallow_us=shallow_us,
        deep_us=deep_us,
        share=deep_us / (1e3 * deep.traced),
        bytes=size,
        gb_s=rate,
        of_ceiling=rate / ceiling if rate is not None and ceiling > 0 else None,
    )


def _depth_row(program: Mapping[str, Any], times: Times, told: Mapping[str, Any]) -> ProfiledDepth:
    kv = round(float(program["kv_bytes_per_position"]) * (times.position + 1))
    size = int(program["weight_bytes"]) + kv
    tokens = max(1, int(told["tokens"]))
    return ProfiledDepth(
        position=times.position,
        tokens=times.tokens,
        token_ms=times.plain,
        traced_ms=times.traced,
        ops_ms=float(times.ops.sum()),
        overlap_ms=times.overlap,
        residual_ms=times.residual,
        bytes=size,
        kv_bytes=kv,
        gb_s=size / (times.plain * 1e6),
        cpu_ms=1e3 * float(told["cpu_s"]) / tokens,
        minor_faults=int(told["minor_faults"]) / tokens,
        major_faults=int(told["major_faults"]) / tokens,
        voluntary_switches=int(told["voluntary_switches"]) / tokens,
        involuntary_switches=int(told["involuntary_switches"]) / tokens,
        counters={name: float(value) / tokens for name, value in told["counters"].items()},
    )


def evidence(
    program: Mapping[str, Any],
    activity: Mapping[str, Any],
    deep: ProfiledDepth,
    groups: Sequence[ProfiledOp],
    ceiling: float,
    ready: Mapping[str, Any],
) -> Evidence:
    """What the verdict rests on. The threads may be more than the unit's: async has queues."""
    threads = max(1, int(program["threads"]))
    told = activity["depths"][-1]
    wall = float(told["wall_s"])
    used = float(told["cpu_s"]) / wall if wall > 0 else None  # cores
    allowed = {str(cpu) for cpu in ready.get("cpus") or activity["cores"]}
    busy = [float(share) for core, share in activity["cores"].items() if str(core) in allowed]
    slow = fallbacks(ready)
    counters = deep.counters
    cycles = counters.get("cycles")
    return Evidence(
        token_ms=deep.token_ms,
        residual_ms=deep.residual_ms,
        traced_ms=deep.traced_ms,
        weight_bytes=int(program["weight_bytes"]),
        kv_bytes=deep.kv_bytes,
        ceiling_gb_s=ceiling if ceiling > 0 else None,
        threads=threads,
        cpu_busy=None if used is None else min(1.0, used / threads),
        free_cores=sum(1 - share for share in busy) if busy else None,
        accelerators={str(k): float(v) for k, v in activity["accelerators"].items()},
        fallback=slow[0] if slow else None,
        largest_op=(groups[0].op, groups[0].share) if groups else None,
        llc_misses=counters.get("llc_misses"),
        instructions_per_cycle=counters["instructions"] / cycles
        if cycles and "instructions" in counters
        else None,
    )


def _typical(line: Timeline, times: Times) -> tuple[tuple[int, float, float], ...]:
    start = int(line.tokens[times.typical, 2])
    rows = line.rows[line.rows[:, 0] == times.typical]
    return tuple(
        (int(index), (int(begin) - start) / 1e3, (int(end) - int(begin)) / 1e3)
        for _, index, begin, end in rows
    )


# --- what is judged --------------------------------------------------------------------------


def _found(details: ProfileDetails, invalid: bool) -> Check:
    """The verdict itself is no fault; without valid clocks it is no verdict either."""
    return Check(
        name="bottleneck",
        outcome=Outcome.INVALID if invalid else Outcome.PASS,
        measured=details.bottleneck,
        limit=None,
        sentence=f"Not judged ({details.clocks}): {details.sentence}"
        if invalid
        else f"{details.sentence} To make it faster: {details.advice}.",
    )


def _adds_up(details: ProfileDetails) -> Check:
    deep = details.depths[-1]
    share = deep.residual_ms / deep.traced_ms
    overlap = f", less {deep.overlap_ms:.3g} ms side by side" if deep.overlap_ms > 0.001 else ""
    return Check(
        name="residual",
        outcome=Outcome.PASS,
        measured=100 * share,
        limit=None,
        unit="%",
        sentence=f"The ops take {deep.ops_ms:.3g} ms{overlap} of {deep.traced_ms:.3g} ms a token; "
        f"{deep.residual_ms:.3g} ms ({share:.0%}) lie between them.",
    )


def _trace_cost(details: ProfileDetails) -> Check:
    deep = details.depths[-1]
    cost = deep.traced_ms / deep.token_ms
    heavy = cost > HEAVY_TRACE
    return Check(
        name="trace_cost",
        outcome=Outcome.WARN if heavy else Outcome.PASS,
        measured=cost,
        limit=HEAVY_TRACE,
        sentence=f"A traced token takes {cost:.2f}× one without"
        + ("; the board was disturbed, or its ops are too short to time." if heavy else "."),
    )


def _depth(reached: int, asked: int) -> Check:
    whole = reached >= asked
    return Check(
        name="depth",
        outcome=Outcome.PASS if whole else Outcome.WARN,
        measured=float(reached),
        limit=float(asked),
        unit="positions",
        sentence=f"Profiled at {SHORTEST} and near {reached} positions."
        if whole
        else f"Profiled up to {reached} of {asked} positions, where the time for filling the cache "
        "ended. --seconds gives it more.",
    )


def _remedy(outcome: Outcome, first: Check, details: ProfileDetails) -> str | None:
    if outcome == Outcome.INVALID:
        return "cool the board or fix its clocks (governor), then profile it again"
    if outcome == Outcome.FAIL:
        if first.name == "kernels":
            return details.advice
        return "run the accuracy stage: it names the op; no speed counts before the text is right"
    return None


PROFILE = Profile()
