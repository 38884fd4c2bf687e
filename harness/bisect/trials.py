"""A trial of a search: what was tried, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Result(StrEnum):
    """How a trial ended. Only FAIL is the failure that is hunted.

    OTHER failed in another way: it is recorded, and counts neither for nor against anything. INFRA
    says that the board, the link or the build failed: the trial is made again, and moves nothing.
    """

    FAIL = "fail"
    PASS = "pass"  # noqa: S105 - a result, not a password
    OTHER = "other"
    INFRA = "infra"

    @property
    def counts(self) -> bool:
        """Whether a search learns from it."""
        return self in (Result.FAIL, Result.PASS)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial.

    `phase` is the part of the search that asked for it. `subject` is what was tried, in plain JSON
    and the search's own words: a prefix, a set of steps, a revision. `signature` says which failure
    it was; `value` is what was measured, in the search's unit. `run` is the id of the run on the
    board, `evidence` whatever else is worth keeping, in plain JSON.
    """

    phase: str
    subject: Mapping[str, Any]
    result: Result
    signature: str | None = None
    value: float | None = None
    seconds: float | None = None
    run: str | None = None
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
