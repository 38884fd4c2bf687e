"""The pages of one board and model: made only when something that they show has changed, and side
by side in processes where there are many."""

from __future__ import annotations

import concurrent.futures
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
from dashboards.pages.base import Places, glance
from dashboards.reading import fill, whole_runs
from harness.store import Store

ALONE = 16  # up to as many parts are made in this process: others would start for longer
MOST_PROCESSES = 8
ROOT = Path(__file__).parent.parent
CODE = ("dashboards", "harness/jobs", "harness/statistics")  # what the pages of a case come from


@dataclasses.dataclass(frozen=True)
class Job:
    """What is made, and of what. `store` is None where the cases of `results` are whole."""

    root: Path
    incremental: bool
    results: Results
    store: str | None  # its URL
    render: Callable[[Case, Places], Mapping[str, bytes]]


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
    text = json.dumps(told, default=str, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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


def make(job: Job, places: Places, store: Store | None, index: int) -> tuple[Part, int]:
    """Writes the files of one case: the part, whose `of` is for the caller to fill in, and how many
    of its files are new. Its note holds the glances of its newest runs."""
    case = job.results.cases[index]
    if store is not None:
        shown = [*case.history, *case.runs.values(), *case.earlier.values()]
        case = fill(case, whole_runs(store, {run.id for run in shown if places.has_run(run)}))
    folder = Folder(job.root, job.incremental)
    files = job.render(case, places)
    for path, content in files.items():
        folder.put(path, content)
    note = {run.id: dataclasses.astuple(glance(run)) for run in case.runs.values()}
    return Part("", {path: len(content) for path, content in files.items()}, note), folder.written


def make_all(
    job: Job, places: Places, indices: Sequence[int], processes: int | None = None
) -> Iterator[tuple[int, Part, int]]:
    """`make` for each of the cases, as (index, part, new files) in any order.

    In processes of their own where that is worth it and can be done: a process with threads must
    not be copied. `processes` says how many; None leaves it to the machine.
    """
    count = _processes(len(indices)) if processes is None else processes
    if count < 2 or job.store is None:
        yield from _make_here(job, places, indices)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), initializer=_begin, initargs=(job,)
    )
    try:
        futures = {pool.submit(_make_there, index): index for index in indices}
        for future in concurrent.futures.as_completed(futures):
            yield (futures[future], *future.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _processes(parts: int) -> int:
    alone = parts <= ALONE or threading.active_count() > 1 or sys.platform != "linux"
    return 1 if alone else min(os.cpu_count() or 1, MOST_PROCESSES)


def _make_here(job: Job, places: Places, indices: Sequence[int]) -> Iterator[tuple[int, Part, int]]:
    if job.store is None:
        yield from ((index, *make(job, places, None, index)) for index in indices)
        return
    with Store.open(job.store) as store:
        yield from ((index, *make(job, places, store, index)) for index in indices)


_working: dict[str, Any] = {}  # of a process of the pool


def _begin(job: Job) -> None:
    _working.update(job=job, places=Places(job.results))


def _make_there(index: int) -> tuple[Part, int]:
    if "store" not in _working:  # opened here: its errors are then the caller's
        _working["store"] = Store.open(_working["job"].store)
    return make(_working["job"], _working["places"], _working["store"], index)


def with_glances(results: Results, notes: Mapping[str, Sequence[Any]]) -> Results:
    """The newest runs of all cases with what was noted of them, by run."""

    def seen(run: Run) -> Run:
        found = notes.get(run.id)
        if found is None:
            return run
        figure, fault, measured, reasons = found
        return dataclasses.replace(run, glance=Glance(figure, fault, measured, tuple(reasons)))

    cases = tuple(
        dataclasses.replace(case, runs={stage: seen(run) for stage, run in case.runs.items()})
        for case in results.cases
    )
    return dataclasses.replace(results, cases=cases)
