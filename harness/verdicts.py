"""What a stage of a bring-up concludes: outcomes, checks with their numbers, and the verdict.

ERROR is infrastructure (a lost link, a full disk, a missing Python) and never a finding about the
product; FAIL is a finding. INVALID is a measurement that must not be judged (throttled, too noisy).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Outcome(StrEnum):
    PASS = "pass"  # noqa: S105 - an outcome, not a password
    WARN = "warn"
    FAIL = "fail"
    INVALID = "invalid"
    ERROR = "error"
    BLOCKED = "blocked"  # an earlier stage of the same board did not pass

    @property
    def lets_next_stage_run(self) -> bool:
        return self in (Outcome.PASS, Outcome.WARN)

    @property
    def exit_code(self) -> int:
        """0 good, 1 a finding, 2 infrastructure."""
        return {"pass": 0, "warn": 0, "fail": 1, "invalid": 1, "error": 2, "blocked": 1}[self.value]


# The worst first: what a summary shows for a set of outcomes.
SEVERITY = (
    Outcome.ERROR,
    Outcome.FAIL,
    Outcome.INVALID,
    Outcome.BLOCKED,
    Outcome.WARN,
    Outcome.PASS,
)


def worst(outcomes: list[Outcome]) -> Outcome:
    """The most severe of `outcomes`; PASS for none."""
    return next((level for level in SEVERITY if level in outcomes), Outcome.PASS)


def one_line(text: str, limit: int = 118) -> str:
    """`text` on one line of at most `limit` characters; what is longer is cut between words."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    cut = line[: limit - 1]
    words = cut.rpartition(" ")[0]
    return (words + " " if len(words) > limit // 2 else cut) + "…"  # one word may fill the line


def noted(outcome: str, limit: float | str | None) -> bool:
    """Whether a check has no limit to pass, and nothing to object to."""
    return limit is None and outcome == Outcome.PASS


class Record(BaseModel):
    """Base of records that are stored or sent: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Check(Record):
    """One acceptance line: what was measured against which limit, and a sentence for people."""

    name: str  # stable id, e.g. "tokens_per_s_at_end"
    outcome: Outcome
    measured: float | str | None
    limit: float | str | None  # None: informational
    unit: str = ""
    sentence: str

    @property
    def noted(self) -> bool:
        return noted(self.outcome, self.limit)


class CrashNote(Record):
    """A crash as it is kept and shown (harness/triage). `name` is its class; `hash` names what is
    the same crash on any board, `finer` a part of that: the same model, options and all frames.
    `facts` are (what, found) lines of evidence."""

    name: str = Field(max_length=40)
    signature: str = Field(max_length=1000)
    hash: str = Field(pattern="^[0-9a-f]{16}$")
    finer: str = Field(pattern="^[0-9a-f]{16}$")
    headline: str
    sentence: str
    remedy: str
    op: str = ""
    facts: tuple[tuple[str, str], ...] = ()


class Verdict(Record):
    """A stage's conclusion. `culprit` is an op id, and only set when the evidence names one."""

    outcome: Outcome
    headline: str  # one line, under 120 characters
    checks: tuple[Check, ...] = ()
    culprit: str | None = None
    remedy: str | None = None  # what to do next, for FAIL and ERROR
    details: dict[str, Any] = Field(default_factory=dict)  # a model of harness.jobs.details
    crash: CrashNote | None = None  # what is known of an engine that ended badly
