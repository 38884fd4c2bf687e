"""Environments with llama.cpp, built from source for this processor, outside the tree.

`llama-cpp-python` is no dependency: it is built on demand (10 to 20 minutes on two cores) from its
source distribution with hashes checked, into the user's cache. Where the processor has AMX there
are two builds, because ggml's AMX code dies at its first tile instruction where the kernel or the
hypervisor permits no tiles. `BENCH_LLAMA_PYTHON=/env/bin/python[:…]` names environments that are
there already; then nothing is built.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.deploy.cache import locked

VARIABLE = "BENCH_LLAMA_PYTHON"
LOCK = Path(__file__).with_name("llama_cpp.lock")
BUILD_S = 7200
# Spelt out for C and C++: -march=native comes behind, and an explicit -mno- wins over it.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# Its version, and whether it was built with AMX.
TELL = """
import llama_cpp
print(llama_cpp.__version__, b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info())
"""
AMX, PLAIN, NATIVE = "with AMX", "without AMX", "native"


class NoLlama(Exception):
    """There is no llama.cpp to compare with; says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    build: str  # AMX, PLAIN, or NATIVE where the processor has none
    python: Path
    version: str


def environments(
    cache: Path, log: Callable[[str], None], *, build: bool = True
) -> list[Environment]:
    """All builds to choose the best from. Raises NoLlama saying what is missing."""
    given = [item for item in os.environ.get(VARIABLE, "").split(os.pathsep) if item]
    if given:
        return _given([Path(item) for item in given])
    builds = {PLAIN: NO_AMX, AMX: ""} if has_amx() else {NATIVE: ""}
    found, trouble = [], ""
    for name, flags in builds.items():
        try:
            found.append(_built(name, flags, cache, log, build))
        except NoLlama as error:
            trouble = str(error)
            log(trouble)
    if not found:
        raise NoLlama(trouble)
    return found


def has_amx() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return False
    return platform.machine() == "x86_64" and " amx_tile" in text


def _given(pythons: Sequence[Path]) -> list[Environment]:
    found: list[Environment] = []
    for number, python in enumerate(pythons, 1):
        told = _told(python)
        if told is None:
            raise NoLlama(f"{VARIABLE}: {python} has no llama_cpp that can be imported")
        version, amx = told
        build = AMX if amx else PLAIN
        if any(item.build == build for item in found):
            build = f"{build}, {number}"
        found.append(Environment(build, python, version))
    return found


def _built(
    name: str, flags: str, cache: Path, log: Callable[[str], None], build: bool
) -> Environment:
    key = hashlib.sha256(LOCK.read_bytes() + f"{flags} {_processor()}".encode()).hexdigest()[:12]
    folder = cache / f"llama-cpp-{name.replace(' ', '-').lower()}-{key}"
    python = folder / "bin" / "python"
    done = folder / ".built"
    with locked(cache / f".{folder.name}.lock"):
        if not done.is_file():
            if not build:
                raise NoLlama(f"llama.cpp ({name}) is not built, and --no-build forbids it")
            missing = [tool for tool in ("cc", "c++") if shutil.which(tool) is None]
            if missing:
                raise NoLlama(f"llama.cpp cannot be built: no {' and no '.join(missing)} here")
            log(f"building llama.cpp ({name}); this takes 10 to 20 minutes, once")
            _build(folder, python, flags)
            done.touch()
    told = _told(python)
    if told is None:
        raise NoLlama(f"llama.cpp ({name}) was built and cannot be imported; remove {folder}")
    version, amx = told
    if amx and flags:
        raise NoLlama(f"llama.cpp ({name}) has AMX all the same; remove {folder}")
    return Environment(name, python, version)


def _build(folder: Path, python: Path, flags: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    log = folder / "build.log"
    # pip's own cache of built wheels does not know our flags: it would give either build for both.
    command = [str(python), "-m", "pip", "install", "--require-hashes", "--no-cache-dir"]
    command += ["--no-binary", "llama-cpp-python", "--disable-pip-version-check", "--no-input"]
    command += ["--requirement", str(LOCK)]
    environment = dict(os.environ)
    for variable in ("CFLAGS", "CXXFLAGS"):  # CMake begins CMAKE_C_FLAGS and _CXX_FLAGS with these
        environment[variable] = f"{environment.get(variable, '')} {flags}".strip()
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=BUILD_S
            ).returncode
        except subprocess.TimeoutExpired:
            raise NoLlama(f"building llama.cpp took more than {BUILD_S} s; see {log}") from None
    if status < 0:
        raise NoLlama(f"building llama.cpp was ended by signal {-status}; run it again")
    if status:
        lines = log.read_text("utf-8", errors="replace").splitlines()
        errors = [line.strip() for line in lines if "error" in line.lower()] or lines[-1:]
        said = errors[-1] if errors else "nothing"
        raise NoLlama(f"llama.cpp could not be built: {said}; the whole log is {log}")


def _told(python: Path) -> tuple[str, bool] | None:
    """Version, and whether AMX is in it; None where it cannot be imported."""
    try:
        done = subprocess.run(
            [str(python), "-c", TELL], capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return (words[-2], words[-1] == "True") if done.returncode == 0 and len(words) > 1 else None


def _processor() -> str:
    """A native build belongs to one kind of processor and one Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags} {sys.version_info[:2]}"
