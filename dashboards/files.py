"""Writing a site: file by file and atomically, only what changed, and away with what is stale."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from harness.errors import HarnessError

MANIFEST = ".dashboard.json"  # which files here are ours; others are never touched


@dataclasses.dataclass
class Folder:
    """A site's folder. Call `expect` with all paths, `put` for each, then `finish`."""

    root: Path
    incremental: bool = True
    written: int = 0
    unchanged: int = 0
    removed: int = 0
    _ours: set[str] = dataclasses.field(default_factory=set)
    _now: set[str] = dataclasses.field(default_factory=set)

    @staticmethod
    def open(root: Path, *, incremental: bool = True) -> Folder:
        """Raises HarnessError for a folder that holds files of somebody else."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            manifest = root / MANIFEST
            if manifest.is_file():
                return Folder(root, incremental, _ours=set(_read_manifest(manifest)))
            taken = next(root.iterdir(), None)
        except OSError as error:
            raise HarnessError(
                f"cannot write there: {error.strerror}",
                where=str(root),
                remedy="choose another folder with --out",
            ) from error
        if taken is not None:
            raise HarnessError(
                f"the folder holds {taken.name!r}, which is not of a dashboard",
                where=str(root),
                expected="an empty or a new folder, or one that a dashboard was built in",
                remedy="choose another folder with --out",
            )
        return Folder(root, incremental)

    def put(self, path: str, content: bytes) -> None:
        """Writes a file unless it holds `content` already. `path` is relative, with slashes."""
        target = self.root / _checked(path)
        self._now.add(path)
        with _reported(target):
            if self.incremental and target.is_file() and target.read_bytes() == content:
                self.unchanged += 1
                return
            _write(target, content)
        self.written += 1

    def expect(self, paths: Iterable[str]) -> None:
        """Notes files before they are written: a build that is cut short leaves nothing behind
        that the next one does not know as ours."""
        new = set(paths) - self._ours
        if new:
            self._ours |= new
            with _reported(self.root):
                self._write_manifest(self._ours)

    def finish(self) -> None:
        """Removes what earlier builds wrote and this one did not."""
        with _reported(self.root):
            for path in sorted(self._ours - self._now):
                target = self.root / path
                if target.is_file():
                    target.unlink()
                    self.removed += 1
                for parent in PurePosixPath(path).parents:
                    if parent.name:
                        with contextlib.suppress(OSError):  # not empty, or gone already
                            (self.root / parent).rmdir()
            self._ours = set(self._now)
            self._write_manifest(self._now)

    def _write_manifest(self, paths: Iterable[str]) -> None:
        content = json.dumps({"files": sorted(paths)}, indent=0).encode() + b"\n"
        target = self.root / MANIFEST
        if not target.is_file() or target.read_bytes() != content:
            _write(target, content)


def _read_manifest(path: Path) -> list[str]:
    """The listed files that lie inside the folder; anything else in it is ignored."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return []
    names = found.get("files") if isinstance(found, dict) else None
    kept = []
    for name in names if isinstance(names, list) else ():
        with contextlib.suppress(ValueError, TypeError):
            kept.append(_checked(name))
    return kept


def _checked(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in path:
        raise ValueError(f"{path!r} does not lie inside the site")
    return path


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp's own mode would hide the page from a web server
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _reported(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HarnessError(
            f"cannot write the dashboard: {error.strerror}",
            where=str(where),
            remedy="free some space, or choose another folder with --out",
        ) from error
