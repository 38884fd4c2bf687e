"""Who watches a campaign: a live table for a terminal, plain lines for a log, silence for programs.

A reporter is told what happens on each board. Calls come from one thread per board; a reporter
guards its own state. Nothing here writes to stdout: that belongs to the result.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from harness.cli.output import visible
from harness.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

STYLES = {
    Outcome.PASS: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.INVALID: "magenta",
    Outcome.ERROR: "bold yellow on red",
    Outcome.BLOCKED: "dim",
}


class Reporter(Protocol):
    """What a campaign tells as it goes. `stage` is "" before the first stage of a board."""

    def begin(self, boards: Sequence[str], stages: Sequence[str]) -> None: ...

    def activity(self, board: str, stage: str, text: str, fraction: float | None = None) -> None:
        """What the board is doing now; `fraction` of it is done, None where nobody knows."""

    def finished(self, board: str, stage: str, verdict: Verdict, *, reused: bool) -> None: ...

    def note(self, text: str) -> None:
        """A sentence for people that belongs to no stage."""

    def end(self) -> None: ...


class Silent:
    """Tells nobody."""

    def begin(self, boards: Sequence[str], stages: Sequence[str]) -> None:
        del boards, stages

    def activity(self, board: str, stage: str, text: str, fraction: float | None = None) -> None:
        del board, stage, text, fraction

    def finished(self, board: str, stage: str, verdict: Verdict, *, reused: bool) -> None:
        del board, stage, verdict, reused

    def note(self, text: str) -> None:
        del text

    def end(self) -> None:
        return None


class PlainLines(Silent):
    """One line per change, for logs and for terminals that are not: at most one line of progress
    per board in `quiet_s` seconds, every outcome at once."""

    def __init__(self, console: Console, *, quiet_s: float = 15.0) -> None:
        self._console, self._quiet_s = console, quiet_s
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, float]] = {}  # board → (stage, when a line was printed)
        self._width = 0

    def begin(self, boards: Sequence[str], stages: Sequence[str]) -> None:
        self._width = max(map(len, boards), default=0)
        count = f"{len(boards)} board{'' if len(boards) == 1 else 's'}"
        self._print(f"{count}: {', '.join(boards)}; stages: {', '.join(stages)}")

    def activity(self, board: str, stage: str, text: str, fraction: float | None = None) -> None:
        now = time.monotonic()
        with self._lock:
            last_stage, last_time = self._last.get(board, ("", float("-inf")))
            if stage == last_stage and now - last_time < self._quiet_s:
                return
            self._last[board] = (stage, now)
        share = "" if fraction is None else f" {fraction:4.0%}"
        self._print(f"{board:<{self._width}}  {stage:<9}{share}  {text}")

    def finished(self, board: str, stage: str, verdict: Verdict, *, reused: bool) -> None:
        again = " (from the interrupted run)" if reused else ""
        outcome = verdict.outcome.value.upper()
        self._print(f"{board:<{self._width}}  {stage:<9} {outcome}{again}: {verdict.headline}")

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(visible(text), markup=False, soft_wrap=True)


@dataclasses.dataclass
class _Row:
    """One board of the live table."""

    stage: str = ""
    text: str = "waiting"
    fraction: float | None = None
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)


class LiveTable(Silent):
    """Boards as rows, stages as columns, and what each board is doing now."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._stages: tuple[str, ...] = ()
        self._rows: dict[str, _Row] = {}
        self._started = time.monotonic()
        self._live: Live | None = None

    def begin(self, boards: Sequence[str], stages: Sequence[str]) -> None:
        from rich.live import Live

        self._stages = tuple(stages)
        self._rows = {board: _Row() for board in boards}
        self._started = time.monotonic()
        self._live = Live(
            console=self._console, refresh_per_second=4, get_renderable=self._table, transient=True
        )
        self._live.start()

    def activity(self, board: str, stage: str, text: str, fraction: float | None = None) -> None:
        with self._lock:
            row = self._rows[board]
            row.stage, row.text, row.fraction = stage, text, fraction

    def finished(self, board: str, stage: str, verdict: Verdict, *, reused: bool) -> None:
        with self._lock:
            row = self._rows[board]
            row.outcomes[stage] = verdict.outcome
            row.text, row.fraction = verdict.headline, None
        if verdict.outcome not in (Outcome.PASS, Outcome.BLOCKED):
            self.note(f"{board} {stage} {verdict.outcome.value.upper()}: {verdict.headline}")

    def note(self, text: str) -> None:
        # While the table is live, rich prints above it.
        self._console.print(visible(text), markup=False)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        elapsed = int(time.monotonic() - self._started)
        table = Table(
            expand=True, title=f"{elapsed // 60}:{elapsed % 60:02}", title_justify="right"
        )
        table.add_column("board", no_wrap=True)
        for stage in self._stages:
            table.add_column(stage, no_wrap=True, min_width=7)
        table.add_column("now", ratio=1, no_wrap=True, overflow="ellipsis")
        with self._lock:
            for board, row in self._rows.items():
                cells = [self._cell(row, stage) for stage in self._stages]
                table.add_row(board, *cells, Text(visible(row.text)))
        return table

    @staticmethod
    def _cell(row: _Row, stage: str) -> Text:
        from rich.text import Text

        outcome = row.outcomes.get(stage)
        if outcome is not None:
            return Text(outcome.value, style=STYLES[outcome])
        if stage != row.stage:
            return Text("·", style="dim")
        return Text("…" if row.fraction is None else f"{min(row.fraction, 1.0):.0%}", style="cyan")


def reporter_for(console: Console) -> Reporter:
    """A live table on a terminal, plain lines elsewhere."""
    return LiveTable(console) if console.is_terminal else PlainLines(console)
