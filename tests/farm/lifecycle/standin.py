"""A small engine for tests of the supervisor: it does what its spec's parameters list.

    python standin.py SPEC --spool DIR --events-fd N --attempt K
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.records import RunSpec
from engine.spool import EnginePipe


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--spool", type=Path)
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--attempt", type=int)
    options = parser.parse_args()
    spec = RunSpec.from_json(options.spec.read_text())
    pipe = EnginePipe(options.events_fd)
    pipe.emit("ready", {"attempt": options.attempt})
    for step in spec.parameters.get("steps", []):
        if step.get("attempt", options.attempt) != options.attempt:
            continue
        status = perform(step, pipe, options)
        if status is not None:
            return status
    return 0


def perform(step: dict[str, Any], pipe: EnginePipe, options: argparse.Namespace) -> int | None:
    do = step["do"]
    if do == "data":
        for number in range(step.get("count", 1)):
            pipe.emit("data", {"name": step["name"], "value": number, "pad": step.get("pad", "")})
            time.sleep(step.get("gap_s", 0.0))
    elif do == "raw":
        os.write(options.events_fd, step["text"].encode())
    elif do == "sleep":
        time.sleep(step["s"])
    elif do == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif do == "print":
        sys.stdout.write(step["text"] * step.get("count", 1))
        sys.stdout.flush()
    elif do == "error":
        pipe.emit("error", step["data"])
    elif do == "child":  # a process that leaves the group and outlives the engine
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)", str(options.spool)],
            start_new_session=True,
        )
        pipe.emit("data", {"name": "child", "value": child.pid})
    elif do == "array":
        import numpy as np

        from engine.spool import save_arrays

        pipe.emit("array", save_arrays(options.spool, step["name"], {"x": np.arange(step["n"])}))
    elif do == "kill":
        os.kill(os.getpid(), signal.Signals[step["signal"]])
    elif do == "exit":
        return int(step["code"])
    else:
        raise ValueError(json.dumps(step))
    return None


if __name__ == "__main__":
    sys.exit(main())
