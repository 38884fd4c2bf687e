"""Engines that ran in a night are kept, so that a later one can be compared with them.

A copy of the sources that reach a board lies in the host's cache under the hash of their content.
The 40 engines that were used last are kept: one that changes every night for over a month, and the
good one for as long as nights look at it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import engine
from harness.bisect.history import runs_on_board
from harness.deploy.cache import locked
from harness.paths import cache_dir

KEPT = 40
FOLDER = "engines"


def source_files(sources: Path) -> list[str]:
    """The files of an engine's folder that reach a board or are built for it, by name, sorted."""
    found = (path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file())
    return sorted(name for name in found if runs_on_board(name))


def build_hash(sources: Path | None = None) -> str:
    """Names the content of an engine's folder, Python and C alike; this checkout's by default."""
    sources = sources or _here()
    digest = hashlib.sha256()
    for name in source_files(sources):
        content = hashlib.sha256((sources / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def keep(sources: Path | None = None) -> str:
    """Keeps a copy of an engine's folder; returns its hash."""
    sources = sources or _here()
    name = build_hash(sources)
    folder = cache_dir(FOLDER)
    place = folder / name
    with locked(folder / ".lock"):
        if not place.is_dir():
            with tempfile.TemporaryDirectory(prefix=".keep-", dir=folder) as made:
                whole = Path(made) / "whole"
                for file in source_files(sources):
                    target = whole / "engine" / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(sources / file, target)
                whole.rename(place)
        os.utime(place)
        others = [path for path in folder.iterdir() if path.is_dir() and path != place]
        others = [path for path in others if not path.name.startswith(".")]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for old in others[: max(0, len(others) + 1 - KEPT)]:
            shutil.rmtree(old, ignore_errors=True)
    return name


def kept(name: str) -> Path | None:
    """The folder of an engine whose hash begins with `name`, which counts as used; None where it
    is not kept (any more), or more than one begins so. Not to be written to."""
    if len(name) < 8 or not set(name) <= set("0123456789abcdef"):
        return None
    found = [path for path in cache_dir(FOLDER).glob(f"{name}*") if path.is_dir()]
    if len(found) != 1:
        return None
    os.utime(found[0])
    return found[0] / "engine"


def _here() -> Path:
    return Path(engine.__file__).parent
