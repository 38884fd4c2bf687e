"""`python -m tests.bench`: run benchmarks, print the table, store it. `make bench` calls this."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from harness.errors import HarnessError
from harness.paths import state_dir

from . import benches, machine, table
from .context import BEST, Bench
from .protocol import ROOT
from .results import TROUBLE, Row, exit_code

ROUNDS, QUICK_ROUNDS = 11, 4
FILE_WIDTH = 150  # of the table where no terminal says how wide it is
# The target table first, in its order; what else lies in the folder follows by name.
ORDER = (
    "decode-135m", "decode-1b", "prefill", "optimisations", "precision", "kv-layout", "buckets",
    "end-of-context", "trace",
)  # fmt: skip
MANUAL = """\
examples:
  make bench                                   everything; an hour and more
  make bench BENCH="decode-135m prefill"       some
  make bench BENCH_ARGS=--quick                less of everything, for trying things out
  BENCH_LLAMA_PYTHON=/env/bin/python make bench    with a llama.cpp that is there already

exit codes:
  0  every target that could be measured was reached
  1  a target was missed, or golden tokens were wrong
  2  something went wrong; with HARNESS_STRICT=1 also when something was skipped
"""


def names() -> list[str]:
    found = [item.name.replace("_", "-") for item in pkgutil.iter_modules(benches.__path__)]
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else 99, name))


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    out = Console()
    if not out.is_terminal:
        out = Console(width=FILE_WIDTH)
    if options.list:
        for name in names():
            print(f"{name:16} {load(name).SUMMARY}")
        return 0
    unknown = sorted(set(options.bench) - set(names()))
    if unknown:
        known = ", ".join(names())
        print(f"no benchmark {unknown[0]!r}; there are: {known}", file=sys.stderr)
        return 2
    threads = options.threads or machine.threads_allowed()
    if threads > machine.threads_allowed():
        allowed = machine.threads_allowed()
        print(f"--threads {threads}: only {allowed} processors are allowed here", file=sys.stderr)
        return 2
    began = datetime.datetime.now(datetime.UTC)
    try:
        folder = state_dir() / "bench" / began.strftime("%Y%m%dT%H%M%SZ")
    except HarnessError as error:
        print(error, file=sys.stderr)
        return 2
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    about = {
        "started": began.isoformat(timespec="seconds"),
        "command": f"python -m tests.bench {' '.join(argv)}".strip(),
        "threads": threads,
        "rounds": rounds,
        "quick": options.quick,
        **machine.description(ROOT),
    }
    rows: list[Row] = []
    stopped = False
    # Ended by somebody else, workers and half-made files are tidied up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in options.bench or names():
        bench = Bench(
            name=name,
            threads=threads,
            rounds=rounds,
            quick=options.quick,
            tiny=options.tiny,
            folder=folder / "logs",
            log=lambda text, name=name: _progress(f"{name}: {text}"),  # type: ignore[misc]  # a default binds the loop's value
            engine=dict(BEST),
            may_build=not options.no_build,
        )
        start = time.monotonic()
        try:
            for row in load(name).run(bench):
                rows.append(row)
                _progress(" | ".join(cell for cell in table.cells(row) if cell))
        except KeyboardInterrupt:
            rows.append(Row(name, "interrupted", TROUBLE))
            stopped = True
        except Exception as error:  # the other benchmarks still have their say
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            (folder / "logs" / f"{name}.traceback").write_text(traceback.format_exc(), "utf-8")
            rows.append(Row(name, "could not run", TROUBLE, notes=(f"{error}",)))
            _progress(f"{name}: {error}")
        _progress(f"{name}: {time.monotonic() - start:.0f} s")
        # After each, so that what an hour has found is not lost with the last minute.
        result, report = table.store(folder, rows, about)
        if stopped:
            break
    out.print(table.as_table(rows, f"Benchmarks, {threads} threads, {about['processor']}"))
    _latest(folder)
    print(f"stored: {result}\n        {report}", file=sys.stderr)
    return exit_code(rows, strict=os.environ.get("HARNESS_STRICT", "") not in ("", "0"))


def load(name: str) -> ModuleType:
    """The benchmark of that name; its file has underscores for dashes."""
    return importlib.import_module(f"{benches.__name__}.{name.replace('-', '_')}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _latest(folder: Path) -> None:
    """A link for people; a file system without links does without."""
    link = folder.parent / "latest"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
    except OSError:
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Speed as ratios, each in one interleaved run, after golden-token checks.",
        epilog=MANUAL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", nargs="*", help="benchmarks to run (default: all); see --list")
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, depths and models")
    parser.add_argument("--tiny", action="store_true", help="tiny models: only to try the code out")
    parser.add_argument("--rounds", type=_positive, help=f"of each race (default {ROUNDS})")
    parser.add_argument("--threads", type=_positive, help="default: all allowed processors")
    parser.add_argument("--no-build", action="store_true", help="build no llama.cpp; skip instead")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
