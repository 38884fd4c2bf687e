"""The dashboard of a farm that was tested every night of a year."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dashboards.site import build
from harness.cli.results import app as results_command
from harness.store import Store

from .. import asv_results, site_store
from ..context import Bench
from ..ratios import Ratio, of_rounds
from ..results import SKIPPED, Row, Target, judged
from ..site_store import Size

SUMMARY = "the site of 200 boards × 365 nights × 4 stages: from nothing, after one run, queries"
# The largest has the targets; the others, a tenth and a hundredth, show how things grow.
SIZES = (Size(20, 37), Size(63, 116), Size(200, 365))
QUICK_SIZES = SIZES[:2]
TINY_SIZES = (Size(3, 4), Size(5, 6))
TARGETS = {
    "site from nothing": Target(60.0, at_least=False),
    "site after one run": Target(3.0, at_least=False),
    "site, nothing new": Target(3.0, at_least=False),
    "Farm page": Target(500.0, at_least=False),
    "newest verdicts": Target(1.0, at_least=False),
    "all runs of a board and stage": Target(1.0, at_least=False),
    "one night": Target(1.0, at_least=False),
}
KB = 1000
QUERIES = 7
ASV = "BENCH_ASV_PYTHON"


def run(bench: Bench) -> Iterator[Row]:
    sizes = TINY_SIZES if bench.tiny else QUICK_SIZES if bench.quick else SIZES
    before: dict[str, float] = {}
    why_not = no_asv()
    if why_not:
        yield Row(bench.name, "against asv", SKIPPED, notes=(why_not,))
    for size in sizes:
        bench.log(f"{size}: {size.results} results")
        with tempfile.TemporaryDirectory(prefix="site-", dir=_room(bench)) as folder:
            site_store.fill(Path(folder) / "results.sqlite", size)
            found = measured(Path(folder), size)
            if not why_not:
                bench.log(f"{size}: asv publish")
                asv, ours = published(Path(folder) / "asv", size), found["site from nothing"].value
                found["asv publish"] = _told([asv])
                yield judged(
                    bench.name,
                    f"asv publish ÷ site from nothing, {size}",
                    _told([asv / ours]),
                    speeds=f"{ours:.1f} s against {asv:.1f} s",
                )
        for name, value in found.items():
            unit = "kB" if name == "Farm page" else "s"
            target = TARGETS.get(name) if size == SIZES[-1] else None
            yield judged(bench.name, f"{name}, {size}", value, target=target, unit=unit)
            if name in before:
                yield judged(
                    bench.name,
                    f"growth of {name}, ten times the results",
                    _told([value.value / before[name]]),
                    speeds=f"{before[name]:.3g} {unit} → {value.value:.3g} {unit}",
                )
        before = {name: value.value for name, value in found.items()}


def no_asv() -> str:
    """Why it cannot be raced, or nothing."""
    python = os.environ.get(ASV, "")
    if not python:
        return f"needs {ASV}: the Python of an environment with asv"
    return "" if os.access(python, os.X_OK) else f"needs {python}, which {ASV} names"


def published(folder: Path, size: Size) -> float:
    """Seconds of `asv publish` on the series of the same nights."""
    asv_results.fill(folder, size)
    python = os.environ[ASV]
    try:
        return _seconds(lambda: asv_results.publish(folder, python))
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"asv publish: {error.stderr.decode(errors='replace')[-2000:]}"
        ) from error


def measured(folder: Path, size: Size) -> dict[str, Ratio]:
    """Seconds, and kilobytes of the Farm page, by name. A site is built once; a query is asked
    several times, the first time of a file that building the site may have left out of memory."""
    out = folder / "site"
    with Store.open(folder / "results.sqlite") as store:
        found = {"site from nothing": [_seconds(lambda: build(store, out))]}
        found["site, nothing new"] = [_seconds(lambda: build(store, out))]
        night = store.find_campaign("last")  # of all boards
        site_store.one_more(store, "board-002")
        found["site after one run"] = [_seconds(lambda: build(store, out))]
        found["Farm page"] = [(out / "index.html").stat().st_size / KB]
    board = "board-003" if size.boards > 2 else "board-001"
    for name, words in (
        ("newest verdicts", ()),
        ("all runs of a board and stage", ("--all", "--board", board, "--stage", "curve")),
        ("one night", ("--campaign", night)),
    ):
        ask = functools.partial(_show, folder, *words)
        found[name] = [_seconds(ask) for _ in range(QUERIES)]
    return {name: _told(values) for name, values in found.items()}


def _show(folder: Path, *words: str) -> None:
    command = ["show", "--store", str(folder / "results.sqlite"), *words]
    with contextlib.redirect_stdout(io.StringIO()):
        results_command(command, standalone_mode=False)


def _seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def _told(values: Sequence[float]) -> Ratio:
    """What was measured, by its median and extremes."""
    return of_rounds(values, [1.0] * len(values))


def _room(bench: Bench) -> Path:
    """Beside the results: a year of 200 boards is more than a temporary folder may hold."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    return bench.folder
