"""A small engine for tests: it does what the `steps` among its spec's parameters list.

By itself, in place of the engine:     python standin.py SPEC --spool DIR --events-fd N --attempt K
As a job of the real engine, copied:   engine/measure/standin.py
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.records import RunSpec
from engine.spool import EnginePipe, save_arrays

Emit = Callable[[str, Mapping[str, Any]], None]


def run(context: Any) -> None:
    """As a job of the engine; `context` is engine.measure.context.JobContext."""
    status = perform(context.spec, context.spool, context.attempt, context.emit)
    if status:
        sys.exit(status)


def main() -> int:
    options = arguments()
    spec = RunSpec.from_json(options.spec.read_text())
    emit = EnginePipe(options.events_fd).emit
    emit("ready", {"attempt": options.attempt})
    return perform(spec, options.spool, options.attempt, emit)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="*")
    parser.add_argument("--spool", type=Path)
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--attempt", type=int)
    options = parser.parse_args()
    options.spec = Path(options.command[-1])
    return options


def perform(spec: RunSpec, spool: Path, attempt: int, emit: Emit) -> int:
    """The exit status."""
    for step in spec.parameters.get("steps", []):
        if step.get("attempt", attempt) == attempt:
            status = one(step, spool, emit)
            if status is not None:
                return status
    return 0


def one(step: Mapping[str, Any], spool: Path, emit: Emit) -> int | None:
    do = step["do"]
    if do == "data":
        for number in range(step.get("count", 1)):
            emit("data", {"name": step["name"], "value": number, "pad": step.get("pad", "")})
            time.sleep(step.get("gap_s", 0.0))
    elif do == "raw":  # bytes on the event pipe that no engine should send
        os.write(arguments().events_fd, step["text"].encode())
    elif do == "sleep":
        time.sleep(step["s"])
    elif do == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif do == "print":
        sys.stdout.write(step["text"] * step.get("count", 1))
        sys.stdout.flush()
    elif do == "error":
        emit("error", step["data"])
    elif do == "child":  # a process that leaves the group and would outlive the engine
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
        )
        emit("data", {"name": "child", "value": child.pid})
    elif do == "wall":  # the wall clock, and a variable of the environment
        emit("data", {"name": "wall", "value": time.time()})
    elif do == "variable":
        emit("data", {"name": step["name"], "value": os.environ.get(step["name"])})
    elif do == "array":
        import numpy as np

        emit("array", save_arrays(spool, step["name"], {"x": np.arange(step["n"])}))
    elif do == "announce":  # an array event that may not be true
        emit("array", step["data"])
    elif do == "kill":
        os.kill(os.getpid(), signal.Signals[step["signal"]])
    elif do == "kill-supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif do == "exit":
        return int(step["code"])
    else:
        raise ValueError(f"unknown step {step}")
    return None


if __name__ == "__main__":
    sys.exit(main())
