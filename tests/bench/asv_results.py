"""The series of a farm's year as a results folder of asv (airspeed velocity), for `asv publish`.

A board is a machine and a night is a commit; each number that a night is held against is a
benchmark, and the curve is one with its lengths as parameters. Layout of the files: asv 0.6,
results version 2, as its `Results.save` writes them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sample_campaigns.verdicts import facts
from .site_store import FIRST, KINDS, STAGES, Size, kind_of, verdict_of

ENVIRONMENT = "engine"
DAY_S = 24 * 3600
COLUMNS = ("result", "params", "version", "started_at", "duration")
Numbers = Mapping[str, tuple[Sequence[float], Sequence[int]]]  # name → values, lengths


def fill(folder: Path, size: Size) -> None:
    """Makes `folder` a project of asv: a repository, results and `asv.conf.json`."""
    folder.mkdir(parents=True)
    commits = _history(folder / "project", size.nights)
    results = folder / "results"
    results.mkdir()
    known = {(stage, kind): _numbers(stage, kind) for stage in STAGES for kind in range(KINDS)}
    _write(results / "benchmarks.json", _benchmarks(known))
    for number in range(1, size.boards + 1):
        board = f"board-{number:03d}"
        machine = {"machine": board, "os": "Linux", "arch": "aarch64", "cpu": _cpu(), "ram": "8 GB"}
        (results / board).mkdir()
        _write(results / board / "machine.json", {**machine, "version": 1})
        for night, commit in enumerate(commits):
            told: dict[str, Any] = {}
            for place, stage in enumerate(STAGES):
                told |= _rows(known[stage, kind_of(night, number - 1, place)], night)
            _write(
                results / board / f"{commit[:8]}-{ENVIRONMENT}.json",
                {
                    "commit_hash": commit,
                    "env_name": ENVIRONMENT,
                    "date": _date_ms(night),
                    "params": machine,
                    "python": "3.11",
                    "requirements": {},
                    "env_vars": {},
                    "result_columns": list(COLUMNS),
                    "results": told,
                    "durations": {},
                    "version": 2,
                },
            )
    _write(
        folder / "asv.conf.json",
        {
            "version": 1,
            "project": "farm",
            "repo": "project",
            "branches": ["main"],
            "results_dir": "results",
            "html_dir": "html",
            "benchmark_dir": "benchmarks",
        },
    )


def publish(folder: Path, python: str) -> None:
    """`asv publish`, from nothing. Raises CalledProcessError."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = [python, "-m", "asv", "publish", "--no-pull"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def _history(folder: Path, nights: int) -> list[str]:
    """A repository with a commit each night; their hashes, the oldest first."""
    stream = []
    for night in range(nights):
        when = int(FIRST.timestamp()) + night * DAY_S
        stream.append(
            f"commit refs/heads/main\ncommitter lab <lab@localhost> {when} +0000\n"
            f"data 5\nnight\nM 644 inline night\ndata {len(str(night))}\n{night}\n\n"
        )
    git = ["git", "-C", str(folder)]
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    subprocess.run([*git, "fast-import", "--quiet"], input="".join(stream), text=True, check=True)
    listed = subprocess.run(
        [*git, "rev-list", "--reverse", "main"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


def _numbers(stage: str, kind: int) -> Numbers:
    """What a night's run of this stage is held against."""
    details = verdict_of(stage, kind).details
    if stage == "tiny":
        return {"tiny.tokens_per_s": ([details["tokens_per_s"]], ())}
    if stage == "accuracy":
        return {"accuracy.mean_kl": ([details["logits"]["mean_kl"]], ())}
    if stage == "stress":
        return {f"stress.{name}": ([details[name]], ()) for name in ("itl_p50_ms", "itl_p99_ms")}
    by_length: dict[int, list[float]] = {}
    for point in details["points"]:  # of several sweeps
        by_length.setdefault(point["length"], []).append(point["tpot_ms"])
    names = ("tokens_per_s_start", "tokens_per_s_end", "ttft_s", "rss_peak_mb")
    return {
        "curve.tpot_ms": (
            [statistics.median(times) for times in by_length.values()],
            list(by_length),
        ),
        **{f"curve.{name}": ([details[name]], ()) for name in names},
    }


def _rows(numbers: Numbers, night: int) -> Iterator[tuple[str, list[Any]]]:
    for name, (values, lengths) in numbers.items():
        lists = [[str(length) for length in lengths]] if lengths else []
        yield name, [list(values), lists, "1", _date_ms(night), 1.0]


def _benchmarks(known: Mapping[Any, Numbers]) -> dict[str, Any]:
    found: dict[str, Any] = {"version": 2}
    for numbers in known.values():
        for name, (_, lengths) in numbers.items():
            found[name] = {
                "name": name,
                "code": "",
                "params": [[str(length) for length in lengths]] if lengths else [],
                "param_names": ["length"] if lengths else [],
                "timeout": 60.0,
                "type": "track",
                "unit": name.rpartition("_")[2],
                "version": "1",
            }
    return found


def _cpu() -> str:
    return str(facts()["model"])


def _date_ms(night: int) -> int:
    return (int(FIRST.timestamp()) + night * DAY_S) * 1000


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
