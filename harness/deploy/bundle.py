"""What a board needs to run the engine: its sources, its native library and its wheels, unpacked
on the host.

Each part is one tar file named by its hash. The same sources give the same bytes on every host, so
a board that holds a part need not be sent it again. A board needs a Python, but no pip, no network.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

import engine
from engine.native.compilers import BuildError, BuildUnavailable
from harness.boards.facts import OLDEST_PYTHON
from harness.deploy.cache import atomic_file, locked, remembered_sha256, sha256_file
from harness.deploy.native import NativeBuild, native_build
from harness.deploy.other_engine import build_of
from harness.deploy.registry import NoSuchWheel, download_deadline, download_wheel
from harness.errors import BoardError, HarnessError
from harness.paths import cache_dir

if TYPE_CHECKING:
    from harness.boards.facts import Facts, PythonFacts
    from harness.inventory.schema import Toolchain

BOARD_WHEELS = ("numpy", "psutil")
LOCK_FILE = Path(__file__).with_name("wheels.lock")
WHEEL_BYTES_LIMIT = 1 << 30  # unpacked; a larger one is not a wheel of ours
KEPT_PARTS = 20  # tars of earlier sources in the cache of the host, of each kind
RECIPE = "2"  # raise it when the tar of a wheel is made differently
# Left out of the tars: a board neither type-checks nor compiles nor tests them.
_LEFT_OUT_FOLDERS = ("tests", "include", "__pycache__")
_LEFT_OUT_SUFFIXES = (".pyi", ".pyc", ".a", ".h", ".pxd")


@dataclasses.dataclass(frozen=True)
class Part:
    """One tar file to be unpacked on a board. `sha256` and `bytes` are the file's."""

    name: str  # "engine", "numpy 2.4.6", "native aarch64-linux-gnu.2.31"
    kind: Literal["engine", "wheel", "native"]
    path: Path
    sha256: str
    bytes: int
    unpacked_bytes: int  # what it takes on a disk, about


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The parts for one kind of board, engine first; `hash` names their whole content.

    `native` is the library in it. Without one `why_not_native` is a sentence that says why.
    """

    parts: tuple[Part, ...]
    hash: str
    native: NativeBuild | None = None
    why_not_native: str | None = "no native code was asked for"

    @property
    def engine_hash(self) -> str:
        """Of the engine's sources alone: the same on boards of every kind."""
        return self.parts[0].sha256

    def environment(self, root: str) -> dict[str, str]:
        """What the engine needs in its environment, with the parts unpacked below `root`."""
        folders = [f"{root}/parts/{part.sha256}" for part in self.parts]
        found = {"PYTHONPATH": ":".join(folders)}
        if self.native is not None:
            at = next(at for at, part in enumerate(self.parts) if part.kind == "native")
            found.update(self.native.environment(folders[at]))
        return found


def build_bundle(
    facts: Facts,
    board: str = "",
    *,
    native: bool = False,
    toolchain: Toolchain | None = None,
    sanitize: str | None = None,
    sources: Path | None = None,
    check: Callable[[], None] | None = None,
) -> Bundle:
    """The parts for a board of these facts, built or from the cache; `board` names it in errors.

    `sources` is the folder of another engine than this checkout's: that one is packed, and its
    library is built by its own recipe.

    With `native` the native library is among them where it can be built: by `toolchain`, else by
    zig. `sanitize`, "address", "thread" or "undefined", asks for a build that finds such faults.
    `check` is called now and then during downloads, builds and waits; what it raises ends them.

    Raises BoardError "no-python" when the board has no Python that the engine can use, and "deploy"
    when the locked version of a library has no wheel for it, or when the native library is not what
    the board can load, or cannot be built by what the user named; HarnessError when the registry is
    out of reach.
    """
    board = board or facts.machine
    python = usable_python(facts, board)
    for name in BOARD_WHEELS:
        check_libc(name, python, facts, board)
    parts = [_engine_part(sources)]
    for name in BOARD_WHEELS:
        try:
            parts.append(_wheel_part(name, python, check))
        except NoSuchWheel as error:
            raise BoardError(
                board,
                "deploy",
                f"Python {python.version} on {facts.machine}, {facts.libc}: {error.found}",
                expected=f"a wheel of the {name} that harness/deploy/wheels.lock names",
                remedy="name a newer Python of the board in devices.yaml (`python:`), or lock a "
                f"version of {name} that supports this one",
            ) from error
    made, why_not = None, Bundle.why_not_native
    if native:
        made, why_not = _native_build(facts, board, toolchain, sanitize, sources, check)
    if made is not None:
        parts.append(_native_part(made))
    digest = hashlib.sha256("\n".join(part.sha256 for part in parts).encode()).hexdigest()
    return Bundle(tuple(parts), digest, made, why_not)


def usable_python(facts: Facts, board: str) -> PythonFacts:
    """The board's Python. Raises BoardError "no-python" without one, or with one too old; "deploy"
    when its libc is one that no wheel is built for."""
    expected = f"Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer on the board"
    remedy = "install python3 there, or name its path in devices.yaml (`python:`)"
    if facts.python is None:
        found = facts.why_no_python()
        raise BoardError(board, "no-python", found, expected=expected, remedy=remedy)
    if facts.python.version_pair < OLDEST_PYTHON:
        found = f"{facts.python.path} is Python {facts.python.version}"
        raise BoardError(board, "no-python", found, expected=expected, remedy=remedy)
    if not facts.python.platform_tags:
        raise BoardError(
            board,
            "deploy",
            f"libc {facts.libc!r} on {facts.machine}",
            expected="glibc or musl with a version, which wheels are built for",
            remedy="use a system with glibc or musl on this board",
        )
    return facts.python


def check_libc(name: str, python: PythonFacts, facts: Facts, board: str) -> None:
    """Whether the board's libc is new enough for a wheel of `name`. Raises BoardError "deploy"."""
    major, minor = python.version_pair
    version, _ = locked_requirement(name, f"{major}.{minor}")
    needs = locked_libc(name, version)
    found = re.match(r"(many|musl)linux_([0-9]+)_([0-9]+)_", python.platform_tags[0])
    if found is None or not needs:
        return  # told by the registry
    kind = "glibc" if found[1] == "many" else "musl"
    own = int(found[2]), int(found[3])
    if kind in needs and own >= needs[kind]:
        return
    oldest = " or ".join(f"{libc} {a}.{b}" for libc, (a, b) in needs.items())
    raise BoardError(
        board,
        "deploy",
        f"Python {python.version} there runs on {kind} {own[0]}.{own[1]} ({facts.machine}), too "
        f"old for {name} {version}",
        expected=f"{oldest}, or newer",
        remedy="update the board's system; an older Python gets an older numpy, so another one "
        "there may do (`python:` in devices.yaml)",
    )


# --- the engine's sources ------------------------------------------------------------------------


def engine_files(root: Path) -> list[tuple[str, bytes]]:
    """(name below the tar, content) of the engine's sources in `root`, sorted by name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not {"tests", "__pycache__"} & set(inside.parts):
            found.append((f"engine/{inside.as_posix()}", path.read_bytes()))
    return found


def plain_tar(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar whose bytes depend on names and contents alone: no times, owners or modes in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 0
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _engine_part(sources: Path | None = None) -> Part:
    """The engine of this checkout, or of the folder `sources`. Not compressed: its hash is that of
    the sources themselves."""
    data = plain_tar(engine_files(sources or Path(engine.__file__).parent))
    return _kept("engine", "engine", "tar", data, len(data))


def _kept(
    name: str, kind: Literal["engine", "native"], suffix: str, data: bytes, unpacked: int
) -> Part:
    """A part in the host's cache, without the oldest of its kind."""
    digest = hashlib.sha256(data).hexdigest()
    path = cache_dir("bundles") / f"{kind}-{digest}.{suffix}"
    if not path.is_file() or path.stat().st_size != len(data):
        with atomic_file(path) as file:
            file.write(data)
        made = sorted(path.parent.glob(f"{kind}-*"), key=lambda item: item.stat().st_mtime_ns)
        for old in made[:-KEPT_PARTS]:
            old.unlink(missing_ok=True)
    return Part(name, kind, path, digest, len(data), unpacked)


# --- the native library --------------------------------------------------------------------------


def _native_build(
    facts: Facts,
    board: str,
    toolchain: Toolchain | None,
    sanitize: str | None,
    sources: Path | None,
    check: Callable[[], None] | None,
) -> tuple[NativeBuild | None, str | None]:
    """The library, or why there is none. What the user named must work: then it is an error. So is
    another engine that does not compile: in numpy it would be compared with what ran natively."""
    try:
        if sources is None:
            made = native_build(facts, board, toolchain, sanitize=sanitize, check=check)
        else:
            made = build_of(sources, facts, board, toolchain, sanitize=sanitize, check=check)
    except BuildError as error:
        broken = sources is not None and not isinstance(error, BuildUnavailable)
        if toolchain is None and sanitize is None and not broken:
            return None, str(error)
        raise BoardError(
            board,
            "deploy",
            error.found,
            expected=error.expected,
            remedy=error.remedy or "correct toolchain in devices.yaml, or leave it out",
        ) from error
    return made, None


def _native_part(made: NativeBuild) -> Part:
    """The library and what it needs beside it. Named by the hash of its content."""
    data = plain_tar(made.files())
    name = f"native {made.target}" + (f" {made.sanitize}" if made.sanitize else "")
    key = (name, hashlib.sha256(data).hexdigest())
    part = _packed.get(key)
    if part is None or not part.path.is_file():
        packed = io.BytesIO()
        with gzip.GzipFile("", "wb", 6, packed, mtime=0) as file:
            file.write(data)
        part = _kept(name, "native", "tar.gz", packed.getvalue(), len(data))
        _packed[key] = part
    return part


# What this process has compressed: it takes longer than all else about a bundle, and boards of one
# kind share it.
_packed: dict[tuple[str, str], Part] = {}


# --- wheels --------------------------------------------------------------------------------------


def locked_requirement(name: str, python: str, lock: Path = LOCK_FILE) -> tuple[str, list[str]]:
    """(version, SHA-256 hashes) of `name` for a board's Python, "3.11", from a lock file.

    The file has one entry per version, `name==1.2 ; python_version < "3.10"` with its hashes; the
    first whose marker fits is taken. Raises HarnessError.
    """
    try:
        text = lock.read_text()
    except OSError as error:
        raise HarnessError(
            f"cannot be read: {error.strerror}",
            where=str(lock),
            remedy="install the harness again: the file belongs to it",
        ) from error
    pattern = rf"^({re.escape(name)}==[^\\\n]+?) \\\n((?:    --hash=\S+(?: \\)?\n)+)"
    for match in re.finditer(pattern, text, re.M):
        requirement = Requirement(match[1])
        fits = requirement.marker is None or requirement.marker.evaluate({"python_version": python})
        if fits:
            version = next(iter(requirement.specifier)).version
            return version, re.findall(r"sha256:([0-9a-f]{64})", match[2])
    raise HarnessError(
        f"no {name}==VERSION with hashes for Python {python}",
        where=str(lock),
        remedy=f"add a version of {name} that has wheels for it",
    )


def locked_libc(name: str, version: str, lock: Path = LOCK_FILE) -> dict[str, tuple[int, int]]:
    """The oldest libc of each kind that the wheels of a version run on, as the lock file says:
    {"glibc": (2, 27), "musl": (1, 2)}; {} where it does not say."""
    exact = rf"^#: {re.escape(name)}=={re.escape(version)} needs (.+)$"
    line = re.search(exact, lock.read_text(), re.M)
    told = re.findall(r"(glibc|musl) (\d+)\.(\d+)", line[1]) if line else []
    return {kind: (int(major), int(minor)) for kind, major, minor in told}


def _wheel_part(name: str, python: PythonFacts, check: Callable[[], None] | None) -> Part:
    major, minor = python.version_pair
    version, hashes = locked_requirement(name, f"{major}.{minor}")
    request = [python.abi, python.platform_tags, RECIPE]
    key = hashlib.sha256(json.dumps([request, hashes]).encode()).hexdigest()[:16]
    folder = cache_dir("wheels")
    index = folder / f"{name}-{version}-{key}.json"
    with locked(folder / f".{name}.lock", check=check):
        part = _from_index(index, f"{name} {version}")
        if part is None:
            arguments = ["--implementation", "cp", "--python-version", f"{major}.{minor}"]
            arguments += ["--abi", python.abi]
            for platform in python.platform_tags:
                arguments += ["--platform", platform]
            with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as temporary:
                wheel = download_wheel(
                    f"{name}=={version}",
                    hashes,
                    Path(temporary),
                    arguments=arguments,
                    deadline=download_deadline(),
                    check=check,
                )
                path = folder / f"{sha256_file(wheel)}-{RECIPE}.tar.gz"
                pack_wheel(wheel, path)
            record: dict[str, str | int] = {
                "file": path.name,
                "sha256": sha256_file(path),
                "wheel": wheel.name,
            }
            record["unpacked"] = _unpacked_bytes(path)
            with atomic_file(index) as file:
                file.write(json.dumps(record, indent=1).encode())
            part = _from_index(index, f"{name} {version}")
    if part is None:
        raise HarnessError("the cached wheel vanished", where=str(folder), remedy="try again")
    return part


def _from_index(index: Path, name: str) -> Part | None:
    """The part that an earlier download left, if it is whole."""
    try:
        record = json.loads(index.read_text())
        path = index.parent / str(record["file"])
        if remembered_sha256(path) != record["sha256"]:
            return None
        size, unpacked = path.stat().st_size, int(record["unpacked"])
        return Part(name, "wheel", path, str(record["sha256"]), size, unpacked)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unpacked_bytes(path: Path) -> int:
    """The tar's contents in whole disk blocks of 4 KiB."""
    with tarfile.open(path) as archive:
        return sum(-(-entry.size // 4096) * 4096 for entry in archive)


def pack_wheel(wheel: Path, target: Path) -> None:
    """Turn a wheel into the tar of what it installs, without tests, stubs and headers.

    Raises HarnessError for a member that would leave the folder, or a wheel beyond all measure.
    """
    files: list[tuple[str, bytes]] = []
    with zipfile.ZipFile(wheel) as archive:
        members = [item for item in archive.infolist() if not item.is_dir()]
        size = sum(item.file_size for item in members)
        if size > WHEEL_BYTES_LIMIT:
            raise HarnessError(f"{size >> 20} MiB unpacked", where=wheel.name)
        for item in members:
            name = _installed_name(item.filename, wheel.name)
            if name is not None:
                files.append((name, archive.read(item)))
    with atomic_file(target) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        packed.write(plain_tar(files))


def _installed_name(member: str, wheel: str) -> str | None:
    """Where pip would install a wheel's member, relative to site-packages; None to leave it out."""
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts or "\\" in member:
        raise HarnessError(f"unsafe member {member!r}", where=wheel)
    parts = path.parts
    if parts[0].endswith(".data"):  # the wheel specification's folders for other places
        if len(parts) < 3 or parts[1] not in ("purelib", "platlib"):
            return None
        parts = parts[2:]
    if set(parts[:-1]) & set(_LEFT_OUT_FOLDERS) or parts[-1].endswith(_LEFT_OUT_SUFFIXES):
        return None
    return "/".join(parts)
