"""A campaign's result for people: a matrix, and a paragraph for everything that did not pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.cli.output import visible
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from harness.farm.results import CampaignResult, StageResult


def print_summary(result: CampaignResult) -> None:
    """The matrix of boards and stages on stdout, coloured on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from harness.farm.progress import STYLES

    console = Console(highlight=False, emoji=False)
    stages = list(dict.fromkeys(stage for row in result.results.values() for stage in row))
    table = Table("board", *stages)
    for board, row in result.results.items():
        cells = (row.get(stage) for stage in stages)
        table.add_row(
            board,
            *(Text("" if c is None else c.outcome.value, style=_style(c, STYLES)) for c in cells),
        )
    console.print(table)
    for line in explanations(result):
        console.print(visible(line), markup=False, soft_wrap=True)


def _style(cell: StageResult | None, styles: dict[Outcome, str]) -> str:
    return "" if cell is None else styles[cell.outcome]


def explanations(result: CampaignResult) -> Iterator[str]:
    """For each stage that did not pass: what was found, which checks say so, what to do."""
    for row in result.results.values():
        for item in row.values():
            if item.outcome not in (Outcome.PASS, Outcome.BLOCKED):
                yield from item.explain()
    for sentence in result.left_behind:
        yield f"left behind on {sentence}"
