"""Runs the benches of planted faults, prints their scores, and stores every case."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import pkgutil
import platform
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.paths import state_dir
from tests.planted import benches
from tests.planted.cases import Bench, Case, Context
from tests.planted.scores import Judged, Score, judge, scores

MANUAL = """\
examples:
  make bench-bisect                                         everything, in full
  make bench-bisect PLANTED="races revisions"               some
  make bench-bisect PLANTED_ARGS="--quick"                  fewer cases, for trying things out

Faults follow from --seed: the same seed plants the same ones, for us and for the baselines.

exit codes:
  0  every target was reached
  1  a target was missed
  2  wrong use, or a bench that could not run
"""
VERSION = 1


def main(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    known = sorted(module.name for module in pkgutil.iter_modules(benches.__path__))
    unknown = [name for name in options.bench if name not in known]
    if unknown:
        parser.error(f"no bench {unknown[0]!r}; known: {', '.join(known)}")
    chosen = [_load(name) for name in options.bench or known]
    if options.list:
        for bench in chosen:
            print(f"{bench.name:<12} {bench.help}")
        return 0
    started = datetime.datetime.now(datetime.UTC)
    rows: list[Score] = []
    judged: list[Judged] = []
    cases: dict[str, list[Case]] = {}
    trouble: dict[str, str] = {}
    for bench in chosen:
        cases[bench.name], found = _run(bench, options, trouble)
        rows += found
        judged += judge(bench.targets, found)
    document = {
        "version": VERSION,
        "started": started.isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "command": ["python", "-m", "tests.planted", *arguments],
        "seed": options.seed,
        "scores": [dataclasses.asdict(row) for row in rows],
        "targets": [
            {"target": f"{item.target.kind}: {item.target}", "value": item.value, "met": item.met}
            for item in judged
        ],
        "trouble": trouble,
        "cases": {name: [_plain(case) for case in found] for name, found in cases.items()},
    }
    folder = state_dir() / "planted"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{started.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    if options.json:
        print(json.dumps({key: value for key, value in document.items() if key != "cases"}))
    else:
        _show(rows, judged)
    print(f"stored: {path}", file=sys.stderr)
    if trouble:
        return 2
    return 0 if all(item.met for item in judged) else 1


def _run(
    bench: Bench, options: argparse.Namespace, trouble: dict[str, str]
) -> tuple[list[Case], list[Score]]:
    """The cases and their scores. One bench that cannot run does not take the others with it."""
    wanted = options.cases or (bench.quick_cases if options.quick else bench.cases)
    context = Context(wanted, options.seed, options.quick, _tell)
    _tell(f"{bench.name}: {bench.help}")
    found: list[Case] = []
    start = time.monotonic()
    try:
        for case in bench.run(context):
            found.append(case)
            if len(found) % 100 == 0:
                _tell(f"{bench.name}: {len(found)} cases, {time.monotonic() - start:.0f} s")
    except Exception as error:
        trouble[bench.name] = f"{type(error).__name__}: {error}"
        _tell(f"{bench.name}: {trouble[bench.name]}")
    _tell(f"{bench.name}: {len(found)} cases in {time.monotonic() - start:.0f} s")
    return found, scores(found)


def _load(name: str) -> Bench:
    bench = importlib.import_module(f"{benches.__name__}.{name}").BENCH
    if not isinstance(bench, Bench):
        raise TypeError(f"tests/planted/benches/{name}.py: BENCH is no Bench")
    return bench


def _plain(case: Case) -> dict[str, Any]:
    fields = {"truth": sorted(case.truth), "named": sorted(case.named), "verdict": case.verdict}
    return {**dataclasses.asdict(case), **fields}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(rows: list[Score], judged: list[Judged]) -> None:
    out = Console(width=max(Console().width, 140))
    table = Table(title="Planted faults: what was named", title_justify="left")
    for heading in ("planted", "by", "cases", "exact", "superset", "wrong (95 %)"):
        table.add_column(heading, justify="left" if heading in ("planted", "by") else "right")
    for heading in ("inconclusive", "runs mean", "runs p95", "claimed → observed"):
        table.add_column(heading, justify="right")
    for row in rows:
        stated = "" if row.claimed is None else f"{row.claimed:.3f} → {row.observed:.3f}"
        table.add_row(
            row.kind, row.contestant, str(row.cases), f"{row.exact:.1%}", f"{row.superset:.1%}",
            f"{row.wrong:.1%} (≤ {row.wrong_high:.1%})", f"{row.inconclusive:.1%}",
            f"{row.runs_mean:.1f}", f"{row.runs_p95:.0f}", stated,
        )  # fmt: skip
    out.print(table)
    for item in judged:
        value = "not run" if item.value is None else f"{item.value:.3g}"
        word = "reached" if item.met else "MISSED"
        out.print(f"{word:<8} {item.target.kind}: {item.target}: {value}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted",
        description="Faults are planted by seed; scores say how often the right one was named.",
        epilog=MANUAL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", nargs="*", help="benches to run (default: all); see --list")
    parser.add_argument("--list", action="store_true", help="name the benches")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--cases", type=_positive, help="of each kind (default: the bench's own)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default 1)")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
