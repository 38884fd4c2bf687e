"""What a campaign concludes about each board and stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.cli.output import EXIT_TROUBLE
from harness.verdicts import Outcome, Verdict, worst

# Kinds of runs without a verdict; they are never taken for judged.
INTERRUPTED = "interrupted"  # the user stopped it
ABANDONED = "abandoned"  # its harness ended, and nobody went on with it


def stopped_verdict() -> Verdict:
    """Of a stage that was not begun, or not ended, when the user asked to stop."""
    return Verdict(
        outcome=Outcome.INVALID,
        headline="stopped by the user",
        remedy="continue it: the same command with --resume",
    )


@dataclasses.dataclass(frozen=True)
class StageResult:
    """One stage on one board. `attempts` counts runs, those that ended in an ERROR included."""

    board: str
    stage: str
    verdict: Verdict
    run_id: str | None
    attempts: int = 1
    reused: bool = False  # judged before the harness was killed; not run again
    error_kind: str | None = None  # a BoardError's kind, or INTERRUPTED

    @property
    def outcome(self) -> Outcome:
        return self.verdict.outcome

    def explain(self) -> list[str]:
        """Lines for people: what was found, which checks say so, the culprit, what to do."""
        kind = f" ({self.error_kind})" if self.error_kind else ""
        name = f"{self.board} {self.stage} {self.outcome.value.upper()}{kind}"
        lines = [f"{name}: {self.verdict.headline}"]
        for check in self.verdict.checks:
            told = check.sentence == self.verdict.headline
            if check.outcome not in (Outcome.PASS, Outcome.BLOCKED) and not told:
                lines.append(f"  {check.name}: {check.sentence}")
        table = self.verdict.details.get("memory_table") or ()
        width = max((len(str(what)) for what, _ in table), default=0)
        lines += [f"    {what:<{width}} {value:8.0f} MiB" for what, value in table]
        if self.verdict.culprit:
            lines.append(f"  first wrong op: {self.verdict.culprit}")
        if self.verdict.remedy:
            lines.append(f"  next: {self.verdict.remedy}")
        return lines


@dataclasses.dataclass(frozen=True)
class CampaignResult:
    """`results` maps board → stage → result, in the order they were asked for."""

    id: str
    results: Mapping[str, Mapping[str, StageResult]]
    interrupted: bool
    left_behind: tuple[str, ...]  # what could not be removed from a board, a sentence each

    @property
    def outcome(self) -> Outcome:
        return worst([item.outcome for row in self.results.values() for item in row.values()])

    @property
    def exit_code(self) -> int:
        """0 every stage passed; 1 a finding; 2 infrastructure, or stopped by the user."""
        if self.interrupted:
            return EXIT_TROUBLE
        codes = [item.outcome.exit_code for row in self.results.values() for item in row.values()]
        return max(codes, default=EXIT_TROUBLE)

    def details(self) -> dict[str, Any]:
        """Board → everything that its one stage measured, for programs."""
        return {
            board: item.verdict.details
            for board, row in self.results.items()
            for item in row.values()
        }

    def as_json(self) -> dict[str, Any]:
        """For programs: outcome, and each board's stages with checks and run ids."""
        return {
            "campaign": self.id,
            "outcome": self.outcome.value,
            "interrupted": self.interrupted,
            "exit_code": self.exit_code,
            "left_behind": list(self.left_behind),
            "boards": {
                board: {
                    stage: {
                        "outcome": item.outcome.value,
                        "headline": item.verdict.headline,
                        "culprit": item.verdict.culprit,
                        "remedy": item.verdict.remedy,
                        "error_kind": item.error_kind,
                        "run_id": item.run_id,
                        "attempts": item.attempts,
                        "reused": item.reused,
                        "checks": [check.model_dump(mode="json") for check in item.verdict.checks],
                    }
                    for stage, item in row.items()
                }
                for board, row in self.results.items()
            },
        }
