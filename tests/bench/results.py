"""What a benchmark says: rows with a number, its spread, its target, and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .ratios import Ratio

REACHED, MISSED, REPORT = "reached", "missed", "report"
INVALID, SKIPPED, TROUBLE = "invalid", "skipped", "trouble"


@dataclasses.dataclass(frozen=True)
class Target:
    """`limit` must be reached from above (`at_least`) or from below; `aim` is what is hoped for."""

    limit: float
    at_least: bool = True
    aim: float | None = None

    def __str__(self) -> str:
        text = f"{'≥' if self.at_least else '≤'} {self.limit:g}"
        return text if self.aim is None else f"{text}, aim {self.aim:g}"

    def reached_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclasses.dataclass(frozen=True)
class Check:
    """The golden tokens of one contestant: how its predictions compare with the float reference.

    `agreement` is the share of positions with the same best token, those aside where the reference
    itself hardly prefers one; `divergence` the mean KL in nats. `failure` says which gate was
    missed, or is empty.
    """

    contestant: str
    positions: int
    decided: int  # positions with a clear best token
    agreement: float
    divergence: float
    failure: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.contestant}: {self.agreement:.1%} of {self.decided} clear best tokens, "
            f"KL {self.divergence:.2g} nats over {self.positions}"
        )
        return f"{text}: {self.failure}" if self.failure else text


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. A row without a number says in `notes` why."""

    bench: str
    name: str
    verdict: str
    ratio: Ratio | None = None
    unit: str = "×"
    target: Target | None = None
    speeds: str = ""  # the two sides in plain units
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def close(self) -> bool:
        """Whether the interval holds the target: another run may decide the other way."""
        if self.ratio is None or self.target is None:
            return False
        low, high = self.ratio.interval
        return low < self.target.limit < high

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "close": self.close}


def judged(
    bench: str,
    name: str,
    ratio: Ratio,
    *,
    target: Target | None = None,
    checks: Iterable[Check] = (),
    unit: str = "×",
    speeds: str = "",
    notes: Iterable[str] = (),
    evidence: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a measured number. A failed golden check makes it invalid, whatever the speed."""
    checks = tuple(checks)
    failed = [str(check) for check in checks if check.failure]
    if failed:
        verdict = INVALID
    elif target is None:
        verdict = REPORT
    else:
        verdict = REACHED if target.reached_by(ratio.value) else MISSED
    return Row(
        bench,
        name,
        verdict,
        ratio,
        unit,
        target,
        speeds,
        (*failed, *notes),
        checks,
        evidence or {},
    )


def exit_code(rows: Iterable[Row], *, strict: bool = False) -> int:
    """0: every target that could be measured was reached; 1: one was missed, or its tokens are
    wrong; 2: something went wrong, or with `strict` something was skipped."""
    verdicts = {row.verdict for row in rows}
    if not verdicts or TROUBLE in verdicts or (strict and SKIPPED in verdicts):
        return 2
    return 1 if verdicts & {MISSED, INVALID} else 0
