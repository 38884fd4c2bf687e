"""Writing a site: file by file and atomically, only what changed, and away with what is stale."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import HarnessError

MANIFEST = ".dashboard.json"  # which files here are ours; others are never touched
MADE_SUFFIXES = (".html", ".csv", ".json")


@dataclasses.dataclass(frozen=True)
class Part:
    """Files that were made of the same inputs, which `of` is a hash of. `note` is plain JSON for
    later builds, which need not make them again."""

    of: str
    files: Mapping[str, int]  # bytes of each
    note: Mapping[str, Any]


@dataclasses.dataclass
class Folder:
    """A site's folder. Call `begin` with what is to be made again and `take` for each part made,
    or `keep` for a part that is there; `expect` and `put` for single files; then `finish`.

    A build that is killed leaves no part that a later one takes for made.
    """

    root: Path
    incremental: bool = True
    written: int = 0
    unchanged: int = 0
    removed: int = 0
    _ours: set[str] = dataclasses.field(default_factory=set)
    _now: set[str] = dataclasses.field(default_factory=set)
    _parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    _making: set[str] = dataclasses.field(default_factory=set)  # beginnings of paths

    @staticmethod
    def open(root: Path, *, incremental: bool = True) -> Folder:
        """Raises HarnessError for a folder that holds files of somebody else."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            manifest = root / MANIFEST
            if manifest.is_file():
                return _known(root, incremental, _read_manifest(manifest))
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

    def keep(self, name: str, of: str) -> Part | None:
        """The part `name`, where an earlier build made it of the same inputs and all its files are
        there; they count as unchanged."""
        part = self._parts.get(name)
        if not self.incremental or part is None or part.of != of:
            return None
        try:
            if any((self.root / path).stat().st_size != size for path, size in part.files.items()):
                return None
        except OSError:
            return None
        self._now |= set(part.files)
        self.unchanged += len(part.files)
        return part

    def begin(self, parts: Mapping[str, Iterable[str]]) -> None:
        """Notes which parts are about to be made, each with the beginnings of its files' paths:
        what a killed build leaves of them is ours, and not whole."""
        self._making |= {_checked(path) for paths in parts.values() for path in paths}
        for name in parts:
            self._parts.pop(name, None)
        if parts:
            with _reported(self.root):
                self._write_manifest(self._ours)

    def take(self, name: str, part: Part, written: int) -> None:
        """A part that was made, `written` of its files anew."""
        self._parts[name] = part
        self._now |= set(part.files)
        self._ours |= set(part.files)
        self.written += written
        self.unchanged += len(part.files) - written

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
            self._making = set()
            self._parts = {n: p for n, p in self._parts.items() if self._now.issuperset(p.files)}
            self._write_manifest(self._now)

    def _write_manifest(self, paths: Iterable[str]) -> None:
        record: dict[str, Any] = {"files": sorted(paths)}
        if self._parts:
            record["parts"] = {
                name: dataclasses.asdict(part) for name, part in sorted(self._parts.items())
            }
        if self._making:
            record["making"] = sorted(self._making)
        content = json.dumps(record, indent=0).encode() + b"\n"
        target = self.root / MANIFEST
        if not target.is_file() or target.read_bytes() != content:
            _write(target, content)


def _read_manifest(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _known(root: Path, incremental: bool, manifest: Mapping[str, Any]) -> Folder:
    """The folder as its list of files tells; what lies outside or cannot be read is ignored."""
    ours = set(_paths(manifest.get("files")))
    making = set(_paths(manifest.get("making")))
    for start in sorted(making):
        for path in (root / start).parent.glob(PurePosixPath(start).name + "*"):
            inside = path.rglob("*") if path.is_dir() else (path,)
            ours |= {
                one.relative_to(root).as_posix() for one in inside if one.suffix in MADE_SUFFIXES
            }
    parts = {}
    listed = manifest.get("parts")
    for name, part in (listed if isinstance(listed, dict) else {}).items():
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            files = {_checked(file): int(size) for file, size in part["files"].items()}
            parts[name] = Part(str(part["of"]), files, dict(part["note"]))
    return Folder(root, incremental, _ours=ours, _parts=parts, _making=making)


def _paths(names: object) -> list[str]:
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
