"""Deadlines as objects on the monotonic clock, passed down a call chain."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Deadline:
    """A moment on CLOCK_MONOTONIC by which something must be done."""

    at: float  # time.monotonic() seconds
    label: str = "operation"

    @staticmethod
    def after(seconds: float, label: str = "operation") -> Deadline:
        return Deadline(time.monotonic() + seconds, label)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining == 0.0

    def within(self, seconds: float, label: str | None = None) -> Deadline:
        """The sooner of this deadline and `seconds` from now."""
        return Deadline(min(self.at, time.monotonic() + seconds), label or self.label)
