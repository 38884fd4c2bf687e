"""The pages of one board and model, and those of a board's nights: made only when something that
they show has changed, and side by side in processes where there are many."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboards.data import Case, Glance, Results, Run
from dashboards.files import Folder, Part
from dashboards.nights import Health
from dashboards.pages.base import Places, glance
from dashboards.pages.health import floor_words
from dashboards.reading import fill, whole_runs
from dashboards.reading_nights import with_series
from harness.statistics.policy import NoiseGrowth
from harness.store import Store

ALONE = 16  # up to as many parts are made in this process: others would start for longer
MOST_PROCESSES = 8
ROOT = Path(__file__).parent.parent
CODE = ("dashboards", "engine", "harness")  # what pages come from


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part that can be made: the pages of case `index`, or, with `nights`, of board `index` of
    the farm's nights. `of` is a hash of what they are made of."""

    name: str
    of: str
    index: int
    nights: bool
    beginnings: tuple[str, ...]  # of the paths of its files


@dataclasses.dataclass(frozen=True)
class Job:
    """What is made, and of what. `store` is None where all of `results` is whole."""

    root: Path
    incremental: bool
    results: Results
    store: str | None  # its URL
    render: Callable[[Case, Places], Mapping[str, bytes]]
    render_nights: Callable[[Health, Results, Places], Mapping[str, bytes]]


@functools.cache
def code() -> str:
    """A hash of the code that makes pages: other code makes other pages of the same results."""
    found = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".jinja", ".css", ".js"):
                found.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def inputs(case: Case, places: Places) -> str:
    """A hash of everything that the pages of a case are made of.

    A run's long fields are not read for it: they change only with its state or the time at which
    it was judged.
    """
    board = dataclasses.astuple(case.board)
    shown = [_light(run, places.has_run(run)) for run in case.history]
    earlier = {stage: run.id for stage, run in case.earlier.items()}
    told = (code(), board, case.model, case.scheme, places.folder(case), shown, earlier)
    return _hash((*told, case.model_hash, case.hyperparameters, places.has_history(case)))


def inputs_of_nights(health: Health, cases: Sequence[tuple[str, str]]) -> str:
    """A hash of everything that the pages of a board's nights are made of: what is known of it
    without its series, and its cases (name, hash)."""
    return _hash((code(), dataclasses.astuple(health), cases))


def _hash(told: object) -> str:
    text = json.dumps(told, default=str, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def units(results: Results, places: Places) -> list[Unit]:
    """All parts of a farm."""
    found = []
    of_board: dict[str, list[tuple[str, str]]] = {}
    histories: dict[str, list[str]] = {}
    for index, case in enumerate(results.cases):
        name, of = places.folder(case), inputs(case, places)
        of_board.setdefault(case.board.name, []).append((name, of))
        histories.setdefault(case.board.name, []).append(f"{name}/history")
        found.append(Unit(name, of, index, False, tuple(beginnings(case, places))))
    for index, health in enumerate(results.nights.health):
        name = places.health(health.board)
        of = inputs_of_nights(health, of_board.get(health.board, ()))
        starts = (name, *histories.get(health.board, ()))
        found.append(Unit(name, of, index, True, starts))
    return found


def _light(run: Run, paged: bool) -> tuple[object, ...]:
    campaign = run.campaign
    return (
        *(run.id, run.stage, run.state, run.outcome, run.started_at, run.finished_at, run.attempt),
        *(run.headline, run.culprit, run.remedy, run.error_kind, run.seconds, paged),
        *(campaign.id, campaign.over, campaign.outcome, campaign.command),
    )


def beginnings(case: Case, places: Places) -> list[str]:
    """How the paths of a case's files begin."""
    runs = [places.run(run).removesuffix(".html") for run in case.history if places.has_run(run)]
    return [places.folder(case) + "/", *runs]


def make(job: Job, places: Places, store: Store | None, unit: Unit) -> tuple[Part, int]:
    """Writes the files of a unit: the part, and how many of its files are new. The note of a case
    holds the glances of its newest runs, that of a board's nights its noise."""
    if unit.nights:
        health = job.results.nights.health[unit.index]
        if store is not None:
            health = with_series(store, health)
        files = job.render_nights(health, job.results, places)
        note: dict[str, Any] = {health.board: noted(health)}
    else:
        case = job.results.cases[unit.index]
        if store is not None:
            shown = [*case.history, *case.runs.values(), *case.earlier.values()]
            case = fill(case, whole_runs(store, {run.id for run in shown if places.has_run(run)}))
        files = job.render(case, places)
        note = {run.id: dataclasses.asdict(glance(run)) for run in case.runs.values()}
    folder = Folder(job.root, job.incremental)
    for path, content in files.items():
        folder.put(path, content)
    sizes = {path: len(content) for path, content in files.items()}
    return Part(unit.of, sizes, note), folder.written


def noted(health: Health) -> dict[str, Any]:
    """What the page of all boards says of a board's series."""
    return {"floor": floor_words(health), "noise": dataclasses.asdict(health.noise)}


def make_all(job: Job, places: Places, wanted: Sequence[Unit]) -> Iterator[tuple[Unit, Part, int]]:
    """`make` for each of them, as (unit, part, new files) in any order.

    In processes of their own where that is worth it and can be done: a process with threads must
    not be copied.
    """
    count = _processes(len(wanted))
    if count < 2 or job.store is None:
        with contextlib.nullcontext() if job.store is None else Store.open(job.store) as store:
            yield from ((unit, *make(job, places, store, unit)) for unit in wanted)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), initializer=_begin, initargs=(job,)
    )
    try:
        futures = {pool.submit(_make_there, unit): unit for unit in wanted}
        for future in concurrent.futures.as_completed(futures):
            yield (futures[future], *future.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _processes(parts: int) -> int:
    alone = parts <= ALONE or threading.active_count() > 1 or sys.platform != "linux"
    return 1 if alone else min(os.cpu_count() or 1, MOST_PROCESSES)


_working: dict[str, Any] = {}  # of a process of the pool


def _begin(job: Job) -> None:
    _working.update(job=job, places=Places(job.results))


def _make_there(unit: Unit) -> tuple[Part, int]:
    if "store" not in _working:  # opened here: its errors are then the caller's
        _working["store"] = Store.open(_working["job"].store)
    return make(_working["job"], _working["places"], _working["store"], unit)


def with_glances(results: Results, notes: Mapping[str, Mapping[str, Any]]) -> Results:
    """The newest runs of all cases with what was noted of them, by run."""

    def seen(run: Run) -> Run:
        found = notes.get(run.id)
        if found is None:
            return run
        lists: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        return dataclasses.replace(run, glance=Glance(**lists))

    cases = tuple(
        dataclasses.replace(case, runs={stage: seen(run) for stage, run in case.runs.items()})
        for case in results.cases
    )
    return dataclasses.replace(results, cases=cases)


def with_noise(results: Results, notes: Mapping[str, Mapping[str, Any]]) -> Results:
    """The boards of the farm's nights with what was noted of their noise."""
    health = tuple(
        dataclasses.replace(one, noise=NoiseGrowth(**notes[one.board]["noise"]))
        for one in results.nights.health
    )
    return dataclasses.replace(results, nights=dataclasses.replace(results.nights, health=health))
