"""The raw files of a run: `raw/RUN_ID/events.jsonl` and `raw/RUN_ID/arrays/*.npz`."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.records import Event, RecordError
from harness.arrays import read_npz
from harness.errors import HarnessError

EVENTS = "events"  # the series that names events.jsonl
SAMPLES = "samples"  # read from the events: one row per resource sample
CONSOLE = "console"  # what the board's serial console printed meanwhile
_WIDEST = 64  # columns that one two-dimensional array may become


@dataclasses.dataclass(frozen=True)
class RawFile:
    name: str  # of the series
    path: str  # relative to the raw folder
    sha256: str
    bytes: int


def adopt(folder: Path | None, raw_root: Path, run_id: str) -> Path | None:
    """The run's folder under `raw_root`, copied there from `folder` unless it is that already."""
    home = raw_root / run_id
    if folder is None or folder.absolute() == home.absolute():
        return home if home.is_dir() else None
    partial = raw_root / f".{run_id}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    if home.exists():
        shutil.rmtree(home)
    partial.rename(home)
    return home


def scan(folder: Path, raw_root: Path) -> list[RawFile]:
    """The files of one run that the store names, each with its hash."""
    found = [(EVENTS, folder / "events.jsonl"), (CONSOLE, folder / "console.log")]
    arrays = folder / "arrays"
    found += [
        (path.relative_to(arrays).with_suffix("").as_posix(), path)
        for path in sorted(arrays.rglob("*.npz"))
    ]
    return [
        RawFile(name, path.relative_to(raw_root).as_posix(), sha256(path), path.stat().st_size)
        for name, path in found
        if path.is_file()
    ]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def events(path: Path) -> Iterator[Event]:
    """The events of a file. A last line cut short (the link or the host died) is left out."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield Event.from_line(line)
        except RecordError as error:
            raise HarnessError(str(error), where=f"{path}:{number}") from error


def duration(folder: Path) -> float | None:
    """Seconds from the first to the last event, by the board's monotonic clock."""
    path = folder / "events.jsonl"
    if not path.is_file():
        return None
    times = [event.t_ns for event in events(path)]
    # A board that was reset in between starts its clock anew: no duration can be told.
    if len(times) < 2 or times[-1] < times[0]:
        return None
    return (times[-1] - times[0]) / 1e9


# Of a `ready` event, what tells how the engine ran.
_ENGINE = ("engine", "unit", "kernels", "native", "threads", "cpus", "layout", "fallbacks", "fault")


def engine_of(folder: Path) -> dict[str, Any] | None:
    """How the engine of a run ran, as its last `ready` event says; None when it never was."""
    path = folder / "events.jsonl"
    if not path.is_file():
        return None
    ready = [event.data for event in events(path) if event.kind == "ready"]
    return {name: ready[-1][name] for name in _ENGINE if name in ready[-1]} if ready else None


def read_frame(path: Path, name: str) -> pd.DataFrame:
    """A raw file as a frame; see `Frames.series` for its shape."""
    if name == EVENTS:
        return pd.DataFrame(
            [(e.n, e.t_ns, e.kind, dict(e.data)) for e in events(path)],
            columns=["n", "t_ns", "kind", "data"],
        )
    if name == SAMPLES:
        return pd.DataFrame(
            [{"t_ns": e.t_ns, **flatten(e.data)} for e in events(path) if e.kind == "sample"]
        )
    if name == CONSOLE:
        lines = path.read_text("utf-8", errors="replace").splitlines()
        return pd.DataFrame({"line": lines})
    return _arrays_frame(read_npz(path), path)


def _arrays_frame(arrays: dict[str, np.ndarray[Any, Any]], path: Path) -> pd.DataFrame:
    columns: dict[str, pd.Series[Any]] = {}
    rows = max((array.shape[0] for array in arrays.values() if array.ndim), default=1)
    for key, array in arrays.items():
        if array.ndim == 0:
            columns[key] = pd.Series([array.item()] * rows)
        elif array.ndim == 1:
            columns[key] = pd.Series(array)
        elif array.ndim == 2 and array.shape[1] <= _WIDEST:
            for index in range(array.shape[1]):
                columns[f"{key}.{index}"] = pd.Series(array[:, index])
        else:
            raise HarnessError(
                f"array {key!r} has the shape {array.shape}, which is no table",
                where=str(path),
                expected=f"one dimension, or two with at most {_WIDEST} columns",
                remedy="read it with numpy.load",
            )
    return pd.DataFrame(columns)


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects and lists as one level: {"a": {"b": 1}} → {"a.b": 1}."""
    if isinstance(data, dict):
        items = [(str(key), value) for key, value in data.items()]
    elif isinstance(data, list):
        items = [(str(index), value) for index, value in enumerate(data)]
    else:
        return {prefix: data}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat
