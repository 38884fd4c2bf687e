"""The Crash page: crashes by signature, the boards they were seen on, evidence, and commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dashboards.charts import Table
from dashboards.data import CrashGroup, Results, Run
from dashboards.pages.base import Page, Places
from harness.triage.deciding import title

FACTS_SHOWN, RUNS_SHOWN = 40, 20


@dataclasses.dataclass(frozen=True)
class GroupView:
    group: CrashGroup
    title: str
    anchor: str
    runs: tuple[tuple[CrashGroup.Seen, str], ...]  # with a link, "" where the run has no page
    left: int  # runs that are not shown
    commands: tuple[tuple[str, str], ...]  # what it does, the command


def pages(results: Results, places: Places) -> list[Page]:
    """One page for all crashes of the store; none without a crash."""
    if not results.crashes:
        return []
    by_id = {run.id: run for run in results.runs}
    groups = tuple(_view(group, by_id, places) for group in results.crashes)
    boards = {seen.board for group in results.crashes for seen in group.seen}
    return [
        Page(
            places.crashes(),
            "crash.html.jinja",
            {
                "title": "Crashes",
                "groups": groups,
                "boards": len(boards),
                "count": sum(len(group.seen) for group in results.crashes),
                "overview": overview(results.crashes),
            },
        )
    ]


def _view(group: CrashGroup, by_id: dict[str, Run], places: Places) -> GroupView:
    shown = group.seen[:RUNS_SHOWN]
    newest = group.seen[0].run_id[:8]
    commands = [("explains it", f"harness triage {newest}")]
    if group.command:
        commands.append((f"shows it again, {group.rate}", group.command))
    else:
        commands.append(("makes it smaller", f"harness triage {newest} --minimise"))
    return GroupView(
        group,
        title(group.name),
        f"crash-{group.hash}",
        tuple(
            (seen, places.run(by_id[seen.run_id]) if seen.run_id in by_id else "") for seen in shown
        ),
        len(group.seen) - len(shown),
        tuple(commands),
    )


def overview(groups: Sequence[CrashGroup]) -> Table:
    """One row for each signature: how often on which board."""
    boards = sorted({seen.board for group in groups for seen in group.seen})
    return Table(
        "Signatures by board",
        ("signature", "class", *boards),
        tuple(
            (
                group.hash,
                title(group.name),
                *(sum(seen.board == board for seen in group.seen) for board in boards),
            )
            for group in groups
        ),
    )
