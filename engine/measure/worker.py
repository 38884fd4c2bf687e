"""The engine process of a run: `python -m engine work SPEC --spool DIR --events-fd N --attempt K`.

Thread counts and affinity are set before numpy is imported, because its BLAS reads them once. Only
the standard library may be imported at the top of this module.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import importlib
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import crashing
from engine.records import RunSpec
from engine.watchdog import answer_to_requests, stacks_name

if TYPE_CHECKING:
    from engine.measure.context import Emit
    from engine.package import Package
    from engine.units import Unit

# Every BLAS that a numpy wheel or a distribution may bring.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# The engine's own choice. The numpy units work in tiles of half a second-level cache, which a
# second BLAS thread does not speed up (67 ms a token with 1 and with 2 threads, SmolLM2-135M on
# Zen 3), and a spinning team slows its neighbours down.
DEFAULT_THREADS = 1
STUCK_SHARE = 0.6  # of the supervisor's patience
_JOB_NAME = re.compile(r"[a-z][a-z0-9_]*")


def main(argv: Sequence[str]) -> int:
    """Run one attempt of a job. 0: it ended; 1: it failed and an `error` event says how; 2: wrong
    use, told on stderr."""
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="engine work", description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--spool", type=Path, required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--run-started-ns", type=int, default=None)
    options = parser.parse_args(argv)
    try:
        spec = RunSpec.from_json(options.spec.read_text())
    except (OSError, ValueError) as error:
        print(f"engine work: {options.spec}: {error}", file=sys.stderr)
        return 2
    answer_to_requests(options.spool / stacks_name(options.attempt))
    crashing.record_to(options.spool / crashing.record_name(options.attempt))
    threads = set_threads(spec)
    if spec.stall_s is not None:  # queues that wait for each other say so before they are ended
        os.environ.setdefault("ENGINE_STUCK_S", f"{max(1.0, STUCK_SHARE * spec.stall_s):g}")

    from engine.spool import EnginePipe

    pipe = EnginePipe(options.events_fd)
    started_ns = options.run_started_ns or run_started_ns(options.spool)
    try:
        run(spec, options.spool, options.attempt, started_ns, pipe.emit, threads)
    except BrokenPipeError:
        print("engine work: the supervisor is gone, ending", file=sys.stderr)
        return 1
    except Exception as error:  # whatever a job raises is told, and the process ends
        traceback.print_exc()
        pipe.emit("error", describe(error))
        return 1
    return 0


def set_threads(spec: RunSpec) -> int:
    """Pin this process and limit the BLAS threads; returns the count. Call before numpy loads.

    A CPU of `pin` that the process may not use is left out; when none remains the mask stays.
    """
    allowed = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        wanted = allowed & set(spec.pin or ())
        if wanted:
            os.sched_setaffinity(0, wanted)
            allowed = wanted
    # The native unit's team yields its CPUs while it waits, so it may have all that are allowed.
    unasked = len(allowed) if spec.unit == "native" else DEFAULT_THREADS
    threads = max(1, min(spec.threads or unasked, len(allowed)))
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    return threads


def run_started_ns(spool: Path) -> int:
    """When the run began: `t_ns` of the spool's first event, or now when there is none yet."""
    try:
        with (spool / "events.jsonl").open("rb") as file:
            return int(json.loads(file.readline())["t_ns"])
    except (OSError, ValueError, KeyError, TypeError):
        return time.monotonic_ns()


def run(
    spec: RunSpec, spool: Path, attempt: int, started_ns: int, emit: Emit, threads: int
) -> None:
    """Load the package, say `ready`, run the job. Raises whatever goes wrong."""
    import numpy as np
    import psutil

    from engine.measure.context import JobContext, JobError, plain

    if not _JOB_NAME.fullmatch(spec.job):
        raise JobError(f"job {spec.job!r}: expected a module name of engine.measure")
    try:
        job = importlib.import_module(f"engine.measure.{spec.job}")
    except ModuleNotFoundError as error:
        if error.name != f"engine.measure.{spec.job}":
            raise  # the job is there, something that it needs is not
        raise JobError(f"job {spec.job!r}: engine.measure has no such module") from error
    if not hasattr(job, "run"):
        raise JobError(f"job {spec.job!r}: engine.measure.{spec.job} is not a job")
    process = psutil.Process()
    bare_rss = process.memory_info().rss
    begin = time.perf_counter()
    package = None
    if spec.package is not None:
        from engine.package import Package

        package = Package.open(spec.package)
    options = dataclasses.replace(spec.engine, threads=threads)
    context = JobContext(spec, package, spool, attempt, started_ns, emit, options)
    ready: dict[str, Any] = {
        "attempt": attempt,
        "job": spec.job,
        "fault": os.environ.get("ENGINE_FAULT"),
        "threads": threads,
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_s": time.perf_counter() - begin,
        "bare_rss_mb": bare_rss / 2**20,
        "package_sha256": spec.package_sha256,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "psutil": psutil.__version__,
        },
        "unit": spec.unit,
        "engine": options.to_mapping(),
    }
    if package is not None:
        unit = context.unit()
        ready["unit"] = unit.name  # a planted fault is part of it
        ready["kernels"] = kernels(unit)
        ready["native"] = native(unit)
        ready["layout"] = package.layout
        ready["scheme"] = package.scheme
        ready["model"] = package.name
        ready["weight_bytes"] = package.weight_bytes
    emit("ready", plain(ready))
    try:
        job.run(context)
    except ArithmeticError as error:
        _look_at_weights(error, package)
        raise
    finally:
        if package is not None:
            package.close()


def _look_at_weights(error: ArithmeticError, package: Package | None) -> None:
    """Adds to a NonFinite's evidence what the op multiplied by."""
    from engine.measure.numbers import about_weights
    from engine.runtime.state import NonFinite

    if isinstance(error, NonFinite) and package is not None:
        error.evidence.update(about_weights(package, str(error.op)))


def kernels(unit: Unit) -> Mapping[str, str]:
    """Which kernel runs each kind of op, as the unit says; numpy and its BLAS when it does not."""
    named = getattr(getattr(unit, "unit", unit), "kernels", None)
    if isinstance(named, Mapping):
        return {str(kind): str(kernel) for kind, kernel in named.items()}
    return {"all": f"numpy ({blas_name()})"}


def native(unit: Unit) -> Mapping[str, Any] | None:
    """Of the native unit: which kernels were chosen and why, and what all allowed cores can do."""
    inner = getattr(unit, "unit", unit)  # of the faulty one
    choice, library = getattr(inner, "choice", None), getattr(inner, "library", None)
    if choice is None or library is None:
        return None
    return {
        "isa": choice.name,
        "reason": choice.reason,
        "missing": list(choice.missing),
        "features": list(library.features.common),
        "library": library.path.parent.name,
    }


def blas_name() -> str:
    """The BLAS that numpy was built with, "unknown" when it does not say."""
    import numpy as np

    try:
        config = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas.get('version', '')}".strip()
    except (KeyError, TypeError):
        return "unknown"


def describe(error: BaseException) -> dict[str, Any]:
    """An `error` event: kind (the class), message, step, layer and op where the error has them, and
    its `evidence`, plain JSON of its own."""
    where: dict[str, Any] = {
        name: getattr(error, name)
        for name in ("step", "layer", "op")
        if isinstance(getattr(error, name, None), (int, str))
    }
    evidence = getattr(error, "evidence", None)
    if isinstance(evidence, Mapping) and evidence:
        where["evidence"] = dict(evidence)
    frames = traceback.extract_tb(error.__traceback__)
    raised_at = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {
        "kind": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "raised_at": raised_at[-3:],
        **where,
    }
