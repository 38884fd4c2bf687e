"""A night: one campaign over all boards, what it found, and what changed since the last one."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.cli.output import EXIT_FINDING, EXIT_GOOD, EXIT_TROUBLE
from harness.farm.results import CampaignResult, StageResult
from harness.farm.since import Changes, changes
from harness.verdicts import Outcome, worst

if TYPE_CHECKING:
    from harness.store import RunRow, Store


@dataclasses.dataclass(frozen=True)
class Report:
    """`retried`: board → stage → the attempts in trouble before the one that counts, as
    (kind, headline)."""

    result: CampaignResult
    changes: Changes
    retried: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]]
    leases: tuple[str, ...]  # still held by this process, a sentence each
    began: datetime.datetime  # by this machine's clock, for people
    seconds: float  # that the night took

    @property
    def exit_code(self) -> int:
        """1 a finding on any board, or a change that an A/B confirmed; 2 trouble alone, or stopped.

        A finding goes before trouble: on a large farm some board is always in trouble.
        """
        if self.result.interrupted:
            return EXIT_TROUBLE
        codes = {item.outcome.exit_code for item in self._items() if not _blocked(item)}
        if EXIT_FINDING in codes or self.changes.confirmed:
            return EXIT_FINDING
        if EXIT_TROUBLE in codes or self.left or not self.result.results:
            return EXIT_TROUBLE
        return EXIT_GOOD

    @property
    def left(self) -> tuple[str, ...]:
        """What this night could not clear away: on boards, and of leases."""
        return (*self.result.left_behind, *self.leases)

    def boards(self) -> dict[str, Outcome]:
        """Each board's worst outcome; what is blocked is told by what blocked it."""
        return {
            board: worst([item.outcome for item in row.values() if not _blocked(item)])
            for board, row in self.result.results.items()
        }

    @property
    def title(self) -> str:
        """One line, such as a subject."""
        outcomes = list(self.boards().values())
        passed = sum(outcome.lets_next_stage_run for outcome in outcomes)
        trouble = outcomes.count(Outcome.ERROR)
        found = len(outcomes) - passed - trouble
        parts = [f"{passed} passed"]
        parts += [f"{found} with findings"] if found else []
        parts += [f"{trouble} in trouble"] if trouble else []
        parts += [f"{len(self.changes.confirmed)} worse"] if self.changes.confirmed else []
        parts += ["stopped"] if self.result.interrupted else []
        count = f"{len(outcomes)} board{'' if len(outcomes) == 1 else 's'}"
        return f"nightly {self.began.astimezone():%Y-%m-%d}: {count}: {', '.join(parts)}"

    def lines(self) -> list[str]:
        """The whole report for people: what was found by board, what changed, what is left."""
        told = [f"{self.title} ({self.seconds / 60:.0f} min)"]
        passed = [board for board, outcome in self.boards().items() if outcome.lets_next_stage_run]
        if passed:
            told.append(f"passed: {', '.join(passed)}")
        for item in self._items():
            if item.outcome not in (Outcome.PASS, Outcome.BLOCKED):
                told += item.explain()
        for board, stages in self.retried.items():
            for stage, attempts in stages.items():
                for number, (kind, headline) in enumerate(attempts, 1):
                    told.append(f"{board} {stage}: attempt {number} ended in {kind}: {headline}")
        told += self.changes.lines()
        told += [f"left behind: {sentence}" for sentence in self.left]
        if not self.left:
            told.append("nothing is left behind: no lease, and no run on any board")
        return told

    def as_json(self) -> dict[str, Any]:
        return {
            **self.result.as_json(),
            "exit_code": self.exit_code,
            "title": self.title,
            "began": self.began.isoformat(),
            "seconds": self.seconds,
            "retried": {
                board: {
                    stage: [{"error_kind": kind, "headline": text} for kind, text in attempts]
                    for stage, attempts in stages.items()
                }
                for board, stages in self.retried.items()
            },
            "changes": self.changes.as_json(),
            "leases_left": list(self.leases),
            "report": self.lines(),
        }

    def _items(self) -> list[StageResult]:
        return [item for row in self.result.results.values() for item in row.values()]


def report(store: Store, result: CampaignResult, seconds: float) -> Report:
    """What there is to say of a night that has ended after `seconds`."""
    from harness.boards.leases import Leases
    from harness.store.owner import current_owner

    campaign = store.campaign(result.id)
    held = [holder for holder in Leases(store).held() if holder.owner == current_owner()]
    return Report(
        result,
        changes(store, result.id),
        _retried(store.campaign_runs(result.id)),
        tuple(f"the lease of {holder.board} ({holder.reason})" for holder in held),
        campaign.started_at,
        seconds,
    )


def _retried(rows: list[RunRow]) -> dict[str, dict[str, tuple[tuple[str, str], ...]]]:
    """Of each board and stage the attempts in trouble before the last one, the oldest first. Runs
    that were judged are no such attempts: a health check comes before and after a stage."""
    attempts: dict[tuple[str, str], list[RunRow]] = {}
    for row in rows:
        if row.state == "judged":
            attempts.setdefault((row.board, row.stage), []).append(row)
    found: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {}
    for (board, stage), tries in attempts.items():
        told = tuple(
            (row.error_kind or str(row.outcome), row.headline or "")
            for row in tries[:-1]
            if row.outcome == Outcome.ERROR
        )
        if told:
            found.setdefault(board, {})[stage] = told
    return found


def _blocked(item: StageResult) -> bool:
    return item.outcome is Outcome.BLOCKED
