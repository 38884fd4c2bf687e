"""Runs a stage's plan on this machine, without a board or SSH: for trying out and for tests.

The engine runs as on a board: its supervisor, a bare Python without site packages, and a spool.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy
import psutil

import engine
from engine.spool import EVENTS_NAME, SPEC_NAME
from harness.jobs.base import Plan
from harness.jobs.runlog import EventTail, RunLog

GRACE_S = 60.0  # beyond the spec's own deadline, which the supervisor keeps


def run_here(plan: Plan, spool: Path, environment: Mapping[str, str] | None = None) -> RunLog:
    """Run `plan` to its end in the new folder `spool`; `environment` is added to the engine's own.

    Raises subprocess.TimeoutExpired when the supervisor outlives its deadline.
    """
    spool.mkdir(parents=True)
    inputs = None if plan.inputs is None else str(plan.inputs)
    spec = dataclasses.replace(plan.spec, inputs=inputs)
    (spool / SPEC_NAME).write_text(spec.to_json())
    places = {str(Path(module.__file__ or "").parents[1]) for module in (engine, numpy, psutil)}
    command = [sys.executable, "-S", "-s", "-m", "engine", "run", str(spool / SPEC_NAME)]
    subprocess.run(
        [*command, "--spool", str(spool)],
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.pathsep.join(sorted(places)),
            **(environment or {}),
        },
        timeout=spec.deadline_s + GRACE_S,
        check=False,  # a failed engine is a result, told in the spool
        capture_output=True,
    )
    events = EventTail(spool / EVENTS_NAME, spec.run_id).events
    end = events[-1].data if events and events[-1].kind == "run-end" else {}
    status = str(end.get("status", "lost"))
    return RunLog(spec.run_id, events, spool, status, str(end.get("reason", "no run-end")))
