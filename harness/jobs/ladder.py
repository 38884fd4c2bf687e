"""The thread ladder: how many threads, on which cores, a board decodes fastest with.

Not a stage of the bring-up but a measurement that its timed stages use, where devices.yaml leaves
threads and cores to the board. The result is kept with the engine, the model, the options and the
board's cores that it was measured with, and made again when one of them changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.placement import Placement
from harness.inventory.engine import AUTO
from harness.jobs import failures
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.details import LadderDetails, LadderRung
from harness.jobs.engines import NATIVE, Tuned, asked_of
from harness.jobs.golden import golden_count, golden_hashes, golden_parameters, judge_right
from harness.jobs.memory import Extent
from harness.jobs.pace import slowest_s
from harness.jobs.validity import conditions, judge_clocks
from harness.statistics.bootstrap import mean_interval
from harness.statistics.validity import INVALID
from harness.verdicts import Check, Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

ROUNDS = 5
BUDGET_S = 12.0
DEPTH = 1024  # positions at which the cache's layouts are compared, where the model goes so far
LAYOUTS = ("mixed", "sd", "ds")  # of the cache; the first where they are alike
PATIENCE = 6.0
SAMPLE_PERIOD_S = 0.25
MOST_RUNGS = 12  # for the deadline


class Ladder:
    """See the module. It has the shape of a stage, and runs like one."""

    name = "ladder"
    order = 3
    needs_model = True
    timed = False

    def extent(self, context: StageContext) -> Extent:
        return Extent(min(2 * DEPTH, context.model.hyperparameters.context))

    def plan(self, context: StageContext) -> Plan:
        asked = asked_of(context.board, context.options.engine)
        threads = asked.threads if asked.threads is not None else context.board.wanted_threads
        native = context.engine.options.unit == NATIVE
        depth = min(DEPTH, context.model.hyperparameters.context // 2)
        parameters: dict[str, object] = {
            "golden": golden_parameters(context),
            "rounds": ROUNDS,
            "budget_s": BUDGET_S,
            "depth": depth,
        }
        if threads != AUTO:
            parameters["threads"] = threads
        cpus = given_cpus(context)
        if cpus:
            parameters["cpus"] = list(cpus)
        if native and asked.kv_layout in (None, AUTO):
            parameters["layouts"] = list(LAYOUTS)
        if native and asked.huge_pages == AUTO:
            parameters["huge"] = True
        tokens = MOST_RUNGS * golden_count(context) + ROUNDS * MOST_RUNGS * 6
        deadline_s = PATIENCE * BUDGET_S + slowest_s(context.model, tokens)
        # A golden text of a rung, or the cache filled to the depth, between two words.
        stall_s = BUDGET_S + slowest_s(context.model, golden_count(context) + depth)
        spec = make_spec(
            context,
            "ladder",
            parameters,
            deadline_s=deadline_s,
            stall_s=stall_s,
            sample_period_s=SAMPLE_PERIOD_S,
        )
        # It goes over all cores itself.
        return Plan(dataclasses.replace(spec, pin=None), None, seconds_hint=BUDGET_S + 10)

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        told = log.data("rungs")
        rungs = tuple(read_rungs(told))
        choice = log.data("choice")
        validity = judge_clocks(context, conditions(log))
        checks = (
            *judge_right(context, log),
            _same_everywhere(log),
            validity.check,
            _measured(rungs, choice),
        )
        outcome = worst([check.outcome for check in checks])
        details = LadderDetails(
            rungs=rungs,
            threads=int(choice["threads"]),
            cpus=_cpus(choice),
            kv_layout=str(choice["kv_layout"]),
            huge_pages=bool(choice["huge_pages"]),
            tokens_per_s=float(choice["tokens_per_s"]),
            clocks=validity.text,
        )
        good = f"{name_of(choice)}: {details.tokens_per_s:.1f} tokens/s{_against(rungs)}"
        first = next((check for check in checks if check.outcome == outcome), checks[0])
        return Verdict(
            outcome=outcome,
            headline=one_line(good if outcome == Outcome.PASS else first.sentence),
            checks=checks,
            remedy=_remedy(outcome, validity.state),
            details=details.model_dump(mode="json"),
        )


def tuned_of(verdict: Verdict) -> Tuned | None:
    """What a ladder that passed found; None for another."""
    if not verdict.outcome.lets_next_stage_run or "rungs" not in verdict.details:
        return None
    found = LadderDetails.model_validate(verdict.details)
    questions = {rung.question for rung in found.rungs}
    return Tuned(
        threads=found.threads,
        cpus=found.cpus,
        kv_layout=found.kv_layout if "kv_layout" in questions else None,
        huge_pages=found.huge_pages if "huge_pages" in questions else None,
    )


def given_cpus(context: StageContext) -> tuple[int, ...] | None:
    """The cores that the ladder is confined to; None: all that are allowed."""
    pin = context.board.pin
    if pin in (AUTO, "none"):
        return None
    return context.engine.pin


def read_rungs(told: Sequence[Mapping[str, Any]]) -> list[LadderRung]:
    """The rungs with an interval of their speed over the visits."""
    found = []
    for rung in told:
        speeds = 1e9 / np.asarray(rung["medians_ns"], np.float64)
        low, high = mean_interval(speeds)
        found.append(
            LadderRung(
                question=str(rung["question"]),
                threads=int(rung["threads"]),
                cpus=_cpus(rung),
                kv_layout=str(rung["kv_layout"]),
                huge_pages=bool(rung["huge_pages"]),
                tokens_per_s=float(rung["tokens_per_s"]),
                low=low,
                high=high,
                visits=len(speeds),
            )
        )
    return found


def name_of(rung: Mapping[str, Any]) -> str:
    """ "2 threads on cores 4-7, ds"."""
    words = [str(Placement(int(rung["threads"]), _cpus(rung))), str(rung["kv_layout"])]
    return ", ".join([*words, "huge pages"] if rung["huge_pages"] else words)


def _cpus(rung: Mapping[str, Any]) -> tuple[int, ...] | None:
    cpus = rung.get("cpus")
    return None if cpus is None else tuple(int(cpu) for cpu in cpus)


def _against(rungs: Sequence[LadderRung]) -> str:
    """How the number of threads mattered, where several were tried."""
    tried = [rung for rung in rungs if rung.question == "threads"]
    if len(tried) < 2:
        return ""
    slowest = min(tried, key=lambda rung: rung.tokens_per_s)
    best = max(tried, key=lambda rung: rung.tokens_per_s)
    gain = best.tokens_per_s / slowest.tokens_per_s
    return f", up to {gain:.2f} × {Placement(slowest.threads, slowest.cpus)}"


def _same_everywhere(log: RunLog) -> Check:
    """Every rung wrote the same golden text."""
    told = golden_hashes(log)
    first = str(told[0]["hash"]) if told else None
    other = next((item for item in told if str(item["hash"]) != first), None)
    return Check(
        name="golden_same",
        outcome=Outcome.FAIL if other is not None else Outcome.PASS,
        measured=str(other["hash"]) if other else first,
        limit=first,
        sentence=f"The golden text depends on how the engine runs: {other['when']} wrote another "
        f"than {told[0]['when']}."
        if other
        else f"{len(told)} ways to run wrote the same golden text.",
    )


def _measured(rungs: Sequence[LadderRung], choice: Mapping[str, Any]) -> Check:
    return Check(
        name="ladder",
        outcome=Outcome.PASS,
        measured=float(choice["tokens_per_s"]),
        limit=None,
        unit="tokens/s",
        sentence="; ".join(
            f"{name_of(rung.model_dump())} {rung.tokens_per_s:.1f} ({rung.low:.1f} to "
            f"{rung.high:.1f})"
            for rung in rungs
        )
        + " tokens/s.",
    )


def _remedy(outcome: Outcome, clocks: str) -> str | None:
    if outcome == Outcome.INVALID and clocks == INVALID:
        return "cool the board or fix its clocks (governor), then measure again"
    if outcome == Outcome.FAIL:
        return "run the accuracy stage: it names the op; no thread count is kept until it passes"
    return None


LADDER = Ladder()
