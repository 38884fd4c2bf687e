"""Searches for a culprit as the pages know them: frozen records, free of the database."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any

from dashboards.search_details import tried


@dataclasses.dataclass(frozen=True)
class Trial:
    number: int  # from 1
    phase: str
    subject: Mapping[str, Any]
    result: str
    signature: str
    value: float | None
    seconds: float | None

    @property
    def words(self) -> str:
        """What was tried, in one line."""
        return tried(self.subject) or json.dumps(dict(self.subject), ensure_ascii=False)[:200]


@dataclasses.dataclass(frozen=True)
class Search:
    id: str
    kind: str
    board: str
    command: str  # as one would type it
    outcome: str | None
    headline: str
    culprits: tuple[str, ...]
    confidence: float | None
    details: Mapping[str, Any]
    started_at: datetime.datetime
    finished_at: datetime.datetime | None
    over: bool  # finished, or its process is gone
    trials: tuple[Trial, ...]
    count: int  # of all trials

    @property
    def status(self) -> str:
        """Its outcome; without one "running", or "stopped" when nobody works on it."""
        if self.outcome is not None:
            return self.outcome
        return "stopped" if self.over else "running"
