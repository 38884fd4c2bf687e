"""The health check, a canary: a short golden run that says whether a *board* computes rightly.

Not a stage of the bring-up. It runs before and after long jobs, and when a person asks for it. A
board that passes it before a job and not afterwards is sick, whatever was measured in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.jobs import failures
from harness.jobs.base import Plan, StageContext, make_spec
from harness.jobs.memory import Extent
from harness.jobs.pace import START_S
from harness.jobs.tiny import (
    cases,
    first_mismatch,
    reference_cases,
    repeats_check,
    same_tokens_check,
    tiny_context,
)
from harness.verdicts import Outcome, Verdict, one_line, worst

if TYPE_CHECKING:
    from typing import Any

    from harness.jobs.runlog import RunLog

ROUNDS = 4
CASES = 4  # of the tiny stage's: those that take no whole context


class Health:
    """See the module. It has the shape of a stage, and runs like one."""

    name = "health"
    order = 0
    needs_model = False
    timed = False

    def extent(self, context: StageContext) -> Extent:
        return Extent(tiny_context(context))

    def plan(self, context: StageContext) -> Plan:
        parameters: dict[str, object] = {
            "cases": _cases(context),
            "rounds": ROUNDS,
            "context": tiny_context(context),
        }
        spec = make_spec(context, "tiny", parameters, deadline_s=120.0, stall_s=START_S)
        return Plan(spec, None, seconds_hint=5.0)

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        broken = failures.judge_failure(context, log, self.name)
        if broken is not None:
            return broken
        asked = _cases(context)
        expected = reference_cases(context, asked, tiny_context(context))
        mismatch, compared = first_mismatch(asked, log.all_data("case"), expected)
        checks = (
            same_tokens_check(mismatch, compared, len(asked)),
            repeats_check(log.data("rounds")["changed"], ROUNDS),
        )
        outcome = worst([check.outcome for check in checks])
        bad = next((check for check in checks if check.outcome == outcome), checks[0])
        good = f"{compared} tokens equal the reference, {ROUNDS} times"
        return Verdict(
            outcome=outcome,
            headline=one_line(good if outcome == Outcome.PASS else bad.sentence),
            checks=checks,
            remedy=None
            if outcome == Outcome.PASS
            else "run `harness bringup --stage tiny` on another board: if that passes, suspect "
            "this one's memory, supply or cooling",
        )


def _cases(context: StageContext) -> list[dict[str, Any]]:
    return cases(context, tiny_context(context))[:CASES]


HEALTH = Health()
