"""The search for a race while it goes on: what is tried, the newest trials, the posterior."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from harness.cli.output import console, say, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.bisect.race import RaceSearch
    from harness.bisect.race_board import Told
    from harness.bisect.race_hunt import Watch
    from harness.bisect.sets import Question

STRIP = 60  # of the newest trials
SHOWN = 8  # likeliest steps
BAR = 30
MARKS = {"fail": "F", "pass": "·", "other": "o", "infra": "?"}
PHASES = {
    "validate": "does it fail asynchronously, and only then?",
    "delays": "whose late result makes it fail?",
    "sets": "which steps have to be asynchronous?",
    "minimal": "does it take each of them?",
    "confirm": "do they fail alone, and the others not?",
}


class RaceView:
    """A live view on a terminal, a line for each phase elsewhere."""

    def __init__(self, budget: int) -> None:
        self._budget, self._strip, self._phase = budget, "", ""
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> RaceView:
        self._live = None
        if console().is_terminal:
            from rich.live import Live

            self._live = self._shown.enter_context(
                Live(console=console(), refresh_per_second=8, transient=True)
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shown.close()
        if isinstance(error, KeyboardInterrupt):
            say("the trials are kept: the same command goes on with the search")

    def watch(self) -> Watch:
        """What a search tells."""
        from harness.bisect.race_hunt import Watch

        return Watch(self._resumed, self._asked, self._told)

    def _resumed(self, search: str, trials: int) -> None:
        say(f"going on with search {search[:8]}, of which {trials} trials are kept")

    def _asked(self, search: RaceSearch, question: Question) -> None:
        if question.phase != self._phase:
            self._phase = question.phase
            if self._live is None:
                say(f"{search.trials} trials: {PHASES.get(self._phase, self._phase)}")
        self._show(search, question)

    def _told(self, search: RaceSearch, question: Question, told: Told) -> None:
        self._strip = (self._strip + MARKS[told.result.value])[-STRIP:]
        self._show(search, question)

    def _show(self, search: RaceSearch, question: Question) -> None:
        if self._live is not None:
            self._live.update(self._table(search, question))

    def _table(self, search: RaceSearch, question: Question) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        configuration = question.configuration
        lines = [
            f"{PHASES.get(question.phase, question.phase)}  {search.trials} of at most "
            f"{self._budget} trials",
            f"{len(configuration.on)} of {len(search.steps)} steps asynchronous, "
            f"{len(configuration.delayed)} held back",
            self._strip,
        ]
        lines += [f"named: {', '.join(race.steps)}" for race in search.named()]
        known = search.posterior()
        if known is not None:
            steps, posterior = known
            for at in np.argsort(-posterior)[:SHOWN]:
                share = float(posterior[at])
                lines.append(f"{steps[at]:<24} {'█' * round(BAR * share):<{BAR}} {share:6.1%}")
        return Group(*(Text(visible(line)) for line in lines))
