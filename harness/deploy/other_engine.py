"""The native library of an engine of other sources than this checkout's, such as an older revision.

It is built by its own recipe: a flag that went missing in `build.py` is a change like any other.
So that engine's build command runs here, as a process of its own, with nothing of ours imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.native.build import SOURCES, build_record
from engine.native.compilers import BuildError
from harness.deploy.cache import atomic_file, locked
from harness.deploy.native import (
    NativeBuild,
    board_compiler,
    board_target,
    check_library,
    native_build,
)
from harness.paths import cache_dir

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.inventory.schema import Toolchain

RECIPE = ("build.py", "compilers.py", "isa.py")  # of engine/native: how sources become a library
BUILD_S = 1800.0
POLL_S = 0.2
SHOWN = 400  # characters of what a build said


def build_of(
    sources: Path,
    facts: Facts,
    board: str,
    toolchain: Toolchain | None = None,
    *,
    sanitize: str | None = None,
    check: Callable[[], None] | None = None,
) -> NativeBuild:
    """The library of the engine in the folder `sources` for a board of these facts, built or from
    the cache. A build that failed is remembered and not tried again.

    Raises BuildError when it cannot be built, BoardError "deploy" when the board cannot load it.
    """
    native = sources / "native"
    if not (native / "build.py").is_file():
        raise BuildError(f"{sources} has no native code", expected="engine/native/build.py in it")
    # The same recipe, or compiler flags and a sanitiser, which its command may not know.
    if _recipe(native) == _recipe(SOURCES.parent) or sanitize or (toolchain and toolchain.flags):
        return native_build(
            facts, board, toolchain, sanitize=sanitize, sources=native / "src", check=check
        )
    target = board_target(facts, toolchain)
    compiler = board_compiler(toolchain, target)
    command = [sys.executable, "-s", "-m", "engine.native.build", "--target", target.triple]
    command += ["--compiler", (toolchain.command if toolchain else None) or "zig"]
    command += ["--cpu", target.cpu] if target.cpu else []
    key = hashlib.sha256(
        json.dumps([command[3:], compiler.version, _content(native)]).encode()
    ).hexdigest()[:32]
    folder = cache_dir("native-others")
    index = folder / f"{key}.json"
    with locked(folder / f".{key}.lock", check=check):
        library, said = _recorded(index)
        if library is None and said is None:
            library, said = _run(command, sources.parent, folder / key, check)
            record = {"library": str(library) if library else None, "said": said}
            with atomic_file(index) as file:
                file.write(json.dumps(record).encode())
    if library is None:
        raise BuildError(f"its own build failed: {said}", remedy="repair that revision, or skip it")
    check_library(library, facts, board)
    return NativeBuild(
        library=library,
        target=target.triple,
        compiler=compiler.name,
        hash=str(build_record(library).get("hash") or key),
    )


def _recipe(native: Path) -> str:
    digest = hashlib.sha256()
    for name in RECIPE:
        path = native / name
        digest.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    return digest.hexdigest()


def _content(native: Path) -> str:
    """A hash of everything below a folder that a build may read."""
    digest = hashlib.sha256()
    for path in sorted(native.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(native).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _recorded(index: Path) -> tuple[Path | None, str | None]:
    """(library, None) or (None, why not) of an earlier build; (None, None) of none."""
    try:
        record = json.loads(index.read_text())
        library = Path(record["library"]) if record["library"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
    if library is not None:
        return (library, None) if library.is_file() else (None, None)
    return None, str(record.get("said") or "no message")


def _run(
    command: list[str], root: Path, out: Path, check: Callable[[], None] | None
) -> tuple[Path | None, str | None]:
    """The library that the command built, or what it said. `root` holds the folder `engine`."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, "--out", str(out)],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=errors,
        )
        try:
            end = time.monotonic() + BUILD_S
            while process.poll() is None:
                if check is not None:
                    check()
                if time.monotonic() > end:
                    raise BuildError(f"its build did not end within {BUILD_S:g} s")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        told.seek(0)
        errors.seek(0)
        lines = told.read().decode(errors="replace").split()
        said = " ".join(errors.read().decode(errors="replace").split())[-SHOWN:]
    if process.returncode == 0 and lines and Path(lines[-1]).is_file():
        return Path(lines[-1]), None
    return None, said or f"status {process.returncode} without a message"
