"""Campaigns as the harness would record them, for the tests of the dashboard."""

from __future__ import annotations

from harness.verdicts import Outcome

from .crashes import crash_verdict, record_crashes
from .nights import NIGHT_BOARD, record_nights, record_noted_nights
from .profiles import profile_verdict, told
from .recorder import (
    FAULT,
    HOSTILE,
    MODEL,
    Recorder,
    record_all,
    record_passing,
    record_troubled,
    record_unfinished,
)
from .searches import record_searches
from .verdicts import accuracy_verdict, curve_verdict, facts, stress_verdict, tiny_verdict

__all__ = [
    "FAULT",
    "HOSTILE",
    "MODEL",
    "NIGHT_BOARD",
    "Outcome",
    "Recorder",
    "accuracy_verdict",
    "crash_verdict",
    "curve_verdict",
    "facts",
    "profile_verdict",
    "record_all",
    "record_crashes",
    "record_nights",
    "record_noted_nights",
    "record_passing",
    "record_searches",
    "record_troubled",
    "record_unfinished",
    "stress_verdict",
    "tiny_verdict",
    "told",
]
