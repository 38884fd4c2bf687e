"""An engine that fails with certain options, simulated: for searches that make no run at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from engine.options import EngineOptions
from engine.program.passes import pass_names
from harness.bisect.option_space import Setting, Space
from harness.bisect.option_verdicts import Question, Verdict
from harness.bisect.options import OptionSearch
from harness.bisect.trials import Result, Trial

ACCURACY, OTHER = "logits", "engine_survived SIGSEGV"


def space(layers: int = 30) -> Space:
    """What the native unit runs best with, on a board of hardware."""
    engine = dataclasses.replace(EngineOptions.for_unit("native"), threads=4, huge_pages=True)
    names = [*(f"L{layer:02}" for layer in range(layers)), "head"]
    return Space(Setting(engine, (4, 5, 6, 7), "interleaved"), names, pass_names())


@dataclasses.dataclass
class SimulatedEngine:
    """Fails with probability `p` where all options of one of `sets` are on, else with `q`.

    `broken`: it dies in another way where the first option is on without the second. `costs` are
    losses that add up; it fails where they reach `limit`. A failure rate below 1 is a matter of
    chance, and then no two runs have the same bits.
    """

    sets: Sequence[frozenset[str]]
    p: float = 1.0
    q: float = 0.0
    broken: Sequence[tuple[str, str]] = ()
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    limit: float = float("inf")
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(0))
    runs: int = 0

    def run(self, question: Question) -> Trial:
        self.runs += 1
        on = question.options
        subject = {"on": sorted(on)}
        for first, second in self.broken:
            if first in on and second not in on:
                return Trial(question.phase, subject, Result.FAIL, OTHER)
        loss = sum(cost for name, cost in self.costs.items() if name in on)
        bad = any(members <= on for members in self.sets)
        failed = loss >= self.limit or self.rng.random() < (self.p if bad else self.q)
        certain = self.p in (0.0, 1.0) and self.q == 0.0
        bits = str(sorted(on)) if certain else str(self.rng.random())
        result = Result.FAIL if failed else Result.PASS
        return Trial(
            question.phase, subject, result, ACCURACY if failed else None, loss + failed,
            evidence={"hash": bits},
        )  # fmt: skip

    def search(self, search: OptionSearch) -> Verdict:
        """Runs until the search ends."""
        while not isinstance(move := search.ask(), Verdict):
            search.tell(self.run(move))
        return move
