"""One host and many boards: what each tool takes to ask all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.boards.null import NullFleet, null_boards
from harness.boards.probe import probe_script
from harness.inventory import Board

from ..context import Bench
from ..fleet_worker import CONTESTANTS, deploy_command, small_bundle
from ..protocol import ROOT, Worker
from ..ratios import Ratio, of_rounds, turns
from ..results import SKIPPED, Row, Target, judged

SUMMARY = "connect, probe, deploy and a null job on 10, 50 and 200 boards, against other tools"
SIZES, QUICK_SIZES = (10, 50, 200), (10, 50)
ROUNDS = 3  # of the largest; a round is minutes
AHEAD = Target(1.0)
ONE = Target(1.0, at_least=False)
OURS = "ours"
TASKS = ("probe", "deploy", "job")
TITLES = {
    "open": "log in",
    "probe": "probe",
    "deploy": "deploy, nothing changed",
    "job": "null job",
    "all": "all four",
}
ALIKE = ("ssh-xargs", "ssh-loop")  # ask what ssh-shared asks, and have nothing to warm up
NONCE = "0123456789abcdef"
PYINFRA = "BENCH_PYINFRA_PYTHON"


@dataclasses.dataclass
class Fleet:
    """Boards that run, and the commands of the tasks for those who have no way of their own."""

    boards: Mapping[str, Mapping[str, Any]]
    commands: Mapping[str, str]
    null: NullFleet


def run(bench: Bench) -> Iterator[Row]:
    others = [name for name in CONTESTANTS if name != OURS]
    if shutil.which("ssh") is None or shutil.which("xargs") is None:
        yield Row(bench.name, "against ssh", SKIPPED, notes=("needs ssh and xargs",))
        others = [name for name in others if not name.startswith("ssh")]
    why_not = no_pyinfra()
    if why_not:
        yield Row(bench.name, "against pyinfra", SKIPPED, notes=(why_not,))
    else:
        others.append("pyinfra")
    for size in QUICK_SIZES[: 1 if bench.tiny else None] if bench.quick else SIZES:
        bench.log(f"{size} boards")
        yield from measured(bench, size, others)


def no_pyinfra() -> str:
    """Why it cannot be raced, or nothing."""
    python = os.environ.get(PYINFRA, "")
    if not python:
        return f"needs {PYINFRA}: the Python of an environment with pyinfra"
    return "" if os.access(python, os.X_OK) else f"needs {python}, which {PYINFRA} names"


def measured(bench: Bench, size: int, others: Sequence[str]) -> Iterator[Row]:
    """The rows of one size: how often a deployment asks, and each task against each other tool."""
    names = (OURS, *others)
    bench.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scale-") as folder, started(size, Path(folder)) as on:
        workers = {name: _worker(bench, name) for name in names}
        try:
            asked = warm_up(on, workers)
            yield asked_row(bench.name, size, asked)
            seconds: dict[str, dict[str, list[float]]] = {
                name: {task: [] for task in TITLES} for name in names
            }
            for order in turns(names, min(bench.rounds, ROUNDS) if size > 10 else bench.rounds):
                for name in order:
                    for task, took in once(on, workers[name]).items():
                        seconds[name][task].append(took)
                    bench.log(f"{size} boards, {name}: {seconds[name]['all'][-1]:.2f} s")
        finally:
            for worker in workers.values():
                worker.close()
    for task, title in TITLES.items():
        for name in others:
            ours, theirs = seconds[OURS][task], seconds[name][task]
            yield judged(
                bench.name,
                f"{title}, {size} boards, {name} ÷ ours",
                of_rounds(theirs, ours),
                target=AHEAD if task == "all" else None,
                speeds=f"{_middle(ours):.3f} s against {_middle(theirs):.3f} s",
                evidence={"seconds": {OURS: ours, name: theirs}},
            )


@contextlib.contextmanager
def started(size: int, folder: Path) -> Iterator[Fleet]:
    """Null boards for as long as the context is open, with what the contestants must know."""
    with null_boards(size, folder / "nulls") as null:
        bundle, files = small_bundle(folder)
        known = folder / "known_hosts"
        lines = [f"[{b.host}]:{b.port} {null.public_host_key}\n" for b in null.boards]
        known.write_text("".join(lines))
        common = {
            "bundle": str(folder),
            "files": [str(part.path) for part in bundle.parts] + [str(path) for path in files],
            "known_hosts": str(known),
            "public_host_key": null.public_host_key,
            "trial": "python3 -S -s -c pass",
        }
        commands = {
            "probe": probe_script(NONCE, None, ("~/work",)),
            "deploy": deploy_command(folder, "python3"),
            "job": "true",
        }
        boards = {board.name: {**_reached(board), **common} for board in null.boards}
        yield Fleet(boards, commands, null)


def _reached(board: Board) -> dict[str, Any]:
    return {
        "host": board.host,
        "port": board.port,
        "user": board.user,
        "host_key": board.host_key,
        "key_file": str(board.key_file),
    }


def _worker(bench: Bench, name: str) -> Worker:
    command = [sys.executable, "-m", "tests.bench.fleet_worker", name]
    if name == "pyinfra":
        command = [os.environ[PYINFRA], str(ROOT / "tests" / "bench" / "pyinfra_worker.py")]
    return Worker(name, command, bench.folder / f"{bench.name}-{name}.log")


def once(fleet: Fleet, worker: Worker) -> dict[str, float]:
    """Seconds of each task by one contestant, log-in first."""
    took = {"open": float(worker.ask("open", boards=fleet.boards)["seconds"])}
    for task in TASKS:
        answer = worker.ask("task", task=task, command=fleet.commands[task])
        took[task] = float(answer["seconds"])
    worker.ask("close")
    return {**took, "all": sum(took.values())}


def warm_up(fleet: Fleet, workers: Mapping[str, Worker]) -> list[int]:
    """Everybody once, so that all is in place on the boards; then they answer from memory, which
    everybody fills. How many commands our deployment took of each board."""
    ours = workers[OURS]
    once(fleet, ours)
    ours.ask("open", boards=fleet.boards)
    ours.ask("task", task="probe", command=fleet.commands["probe"])
    before = fleet.null.counts()
    ours.ask("task", task="deploy", command=fleet.commands["deploy"])
    after = fleet.null.counts()
    ours.ask("close")
    for name, worker in workers.items():
        if worker is not ours and name not in ALIKE:
            once(fleet, worker)
    fleet.null.remember()
    for name, worker in workers.items():
        if name not in ALIKE:
            once(fleet, worker)
    return [
        after[name].commands + after[name].sftp - counts.commands - counts.sftp
        for name, counts in before.items()
    ]


def asked_row(bench: str, size: int, asked: Sequence[int]) -> Row:
    """A count, so that no weather of the machine is in it."""
    most, least = max(asked), min(asked)
    ratio = Ratio(float(most), float(least), float(most), (float(least), float(most)), 1)
    name = f"round trips of a deployment that changes nothing, {size} boards"
    return judged(bench, name, ratio, target=ONE, unit="a board")


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
