"""A visit: one fresh process of one arm on the board, from its start to its numbers."""

from __future__ import annotations

import dataclasses
import statistics
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.bisect import hunted
from harness.bisect.board_trials import OF_THE_ENGINE
from harness.compare.judging import Visit
from harness.deploy.models import in_layout
from harness.errors import BoardError, HarnessError
from harness.farm.aboard import runs_of_tests
from harness.farm.decoding import carry_out
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.engines import EngineChoice, layout_of
from harness.jobs.pace import slowest_s
from harness.jobs.validity import conditions
from harness.statistics.validity import Start

if TYPE_CHECKING:
    from harness.compare.arms import Arm
    from harness.farm.deployed import Deployed
    from harness.jobs.runlog import RunLog

SAMPLE_PERIOD_S = 0.25  # 30 busy samples of clocks in all visits of an arm, however fast it is


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a visit measures: `tokens` new ones after a prompt of `depth`, `repeats` times after one
    that warms up. The median over the repeats is the visit's value."""

    depth: int = 128
    tokens: int = 32
    repeats: int = 3


class Broken(HarnessError):
    """An arm does not run: it crashed, hung, or could not be tried."""


class Visits:
    """Makes visits on a board that is leased; both arms' models are there already."""

    def __init__(
        self,
        there: Deployed,
        arms: Mapping[str, Arm],
        measure: Measure,
        folder: Path,
        stop: Callable[[], bool],
    ) -> None:
        self._there, self._arms, self._measure = there, arms, measure
        self._folder, self._stop = folder, stop
        self.config: dict[str, dict[str, object]] = {}  # letter → what ran, as it was resolved

    def __call__(self, letter: str) -> Visit:
        """Raises Broken when the arm fails, BoardError when the board does."""
        try:
            return self._visited(letter)
        except BoardError as error:
            if error.kind in OF_THE_ENGINE:  # a second try would give the same
                raise Broken(f"{letter} cannot be tried: {error.found}") from error
            raise

    def _visited(self, letter: str) -> Visit:
        arm, there = self._arms[letter], self._there
        began = time.monotonic()
        there.board = arm.board
        if there.sources != arm.sources:
            there.sources = arm.sources
            there.renew()
        choice = arm.choice or there.engine_asked(arm.engine)
        self.config.setdefault(letter, _config(arm, choice))
        model = in_layout(arm.model, layout_of(choice.options.unit))
        context = StageContext(
            board=arm.board,
            facts=there.facts,
            model=model,
            options=BringupOptions(),
            run_id=f"{runs_of_tests(there.store)}{uuid.uuid4().hex}",
            remote_package=there.deployment.paths[model.sha256],
            cache=self._folder,
            engine=choice,
        )
        wanted, patience = self._measure, slowest_s(model, self._measure.depth)
        count = wanted.repeats + 1
        plan = hunted.generation(
            context,
            wanted.tokens,
            count,
            prompt=wanted.depth,
            deadline_s=count * slowest_s(model, wanted.depth + wanted.tokens),
            stall_s=max(hunted.STALL_S, patience),
            sample_period_s=SAMPLE_PERIOD_S,
        )
        log, _ = carry_out(there, context, plan, self._folder, self._stop)
        broken = hunted.broken(context, log, "compare")
        if broken is not None:
            told = broken.evidence.get("headline") or broken.signature
            raise Broken(f"{letter} ({arm.title}) does not run: {told}")
        return visit_of(log, context, time.monotonic() - began)


def visit_of(log: RunLog, context: StageContext, seconds: float) -> Visit:
    """The numbers of one run's log."""
    turns = hunted.counted_turns(log)
    found: dict[str, float] = {}
    tpots = hunted.tpots_s(turns)
    if tpots:
        found["tpot_s"] = statistics.median(tpots)
    firsts = [float(turn["times_s"][0]) for turn in turns if turn["times_s"]]
    if firsts:
        found["ttft_s"] = statistics.median(firsts)
    peak = hunted.peak_rss_mb(log)
    if peak is not None:
        found["rss_mb"] = peak
    seen = conditions(log)
    clocks = seen.clock_mhz[seen.busy & np.isfinite(seen.clock_mhz)]
    heat = seen.temperature_c[np.isfinite(seen.temperature_c)]
    start = Start(context.facts.boot_id, float(heat[0]) if len(heat) else None)
    return Visit(found, start, tuple(float(mhz) for mhz in clocks), seconds, context.run_id)


def _config(arm: Arm, choice: EngineChoice) -> dict[str, object]:
    resolved = dataclasses.replace(arm, choice=choice).config()
    return {**resolved, "cores": list(choice.pin) if choice.pin is not None else None}
