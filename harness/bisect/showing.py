"""How a search over revisions looks while it goes on: what is tried now, and who is suspected."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from harness.bisect.hunt import Standing
from harness.cli.output import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

ROWS = 8  # suspects that are shown
BAR = 24  # characters
QUIET_S = 15.0  # between two lines, where there is no terminal


class View:
    """A live list of suspects on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._standing: Standing | None = None
        self._now = "beginning"
        self._started = time.monotonic()
        self._printed = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> View:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                console=self._console,
                refresh_per_second=4,
                get_renderable=self._table,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def standing(self, standing: Standing) -> None:
        with self._lock:
            self._standing = standing
        if self._live is None and time.monotonic() - self._printed >= QUIET_S:
            self._printed = time.monotonic()
            trying = f", trying {standing.trying.name}" if standing.trying else ""
            first = suspects(standing)[:1]
            suspect = f"; {first[0][1]:.0%} {first[0][0]}" if first else ""
            self.note(f"{standing.trials} trials, {standing.phase}{trying}{suspect}")

    def tell(self, text: str) -> None:
        with self._lock:
            self._now = text

    def note(self, text: str) -> None:
        self._console.print(visible(text), markup=False, soft_wrap=True)

    def _table(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        elapsed = int(time.monotonic() - self._started)
        with self._lock:
            standing, now = self._standing, self._now
        head = f"{standing.trials} trials, {standing.phase}" if standing else "beginning"
        table = Table(
            title=f"{head}   {elapsed // 60}:{elapsed % 60:02}",
            title_justify="left",
            show_header=False,
            box=None,
            caption=visible(now),
            caption_justify="left",
        )
        for name, share in suspects(standing)[:ROWS] if standing else ():
            table.add_row(f"{share:4.0%}", "█" * round(share * BAR), Text(visible(name)))
        return table


def suspects(standing: Standing) -> list[tuple[str, float]]:
    """(name, probability) of revisions, the likeliest first; of equals the oldest."""
    named = {one.hash: one.name for one in standing.revisions}
    found = sorted(standing.posterior.items(), key=lambda item: -item[1])
    return [(named[name], share) for name, share in found if name in named]
