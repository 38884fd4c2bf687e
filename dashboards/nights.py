"""What pages know of nights and boards: series, and each board's health; free of the database."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping

from harness.farm.series import Series
from harness.statistics.nights import Record
from harness.statistics.policy import NoiseGrowth
from harness.store.alerts import Alert


@dataclasses.dataclass(frozen=True)
class Happening:
    """A line of a board's journal."""

    kind: str
    good: bool
    told: str
    at: datetime.datetime


@dataclasses.dataclass(frozen=True)
class Health:
    """One board. `held` and `aside` are sentences, "" for a board that is free and admitted."""

    board: str
    virtual: bool
    last_seen: datetime.datetime | None
    held: str
    aside: str
    journal: tuple[Happening, ...]  # the newest first
    check: Happening | None  # the newest health check
    series: tuple[Series, ...]
    noise: NoiseGrowth
    alerts: tuple[Alert, ...]  # the newest first

    @property
    def status(self) -> str:
        """A word that the pages have a chip for."""
        if self.aside:
            return "error"
        if self.check is not None and not self.check.good:
            return "fail"
        if self.noise.grew:
            return "warn"
        return "pass" if self.check is not None else "none"


@dataclasses.dataclass(frozen=True)
class Nights:
    health: tuple[Health, ...] = ()
    detectors: tuple[Record, ...] = ()
    # (board, model, scheme) of those that nights measured; None: those that `health` has series of
    measured: frozenset[tuple[str, str, str]] | None = None

    @property
    def by_case(self) -> Mapping[tuple[str, str, str], list[Series]]:
        """(board, model, scheme) → its series, where they were read."""
        found: dict[tuple[str, str, str], list[Series]] = {}
        for one in self.health:
            for series in one.series:
                found.setdefault((one.board, series.model, series.scheme), []).append(series)
        return found

    @property
    def cases(self) -> frozenset[tuple[str, str, str]]:
        """(board, model, scheme) of all that has a history."""
        return frozenset(self.by_case) if self.measured is None else self.measured
