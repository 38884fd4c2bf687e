"""The C compilers that the native library is built with, and what it is built for.

zig's clang (the `ziglang` wheel) comes first: the same version everywhere, it knows every target
and every libc version. Any gcc or clang can be named instead. Standard library alone, as in
`build.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.native.isa import machine_name

COMPILER_VARIABLE = "ENGINE_CC"  # names the compiler of local builds


class BuildError(RuntimeError):
    """No library: says what was found, what was expected and what to do."""

    def __init__(self, found: str, *, expected: str = "", remedy: str = "") -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        text = f"native library: {found}"
        text += f"; expected {expected}" if expected else ""
        super().__init__(text + (f"; {remedy}" if remedy else ""))


class BuildUnavailable(BuildError):
    """This host cannot build it at all: no compiler, no sources, or no kernels for that machine."""


Check = Callable[[], None]  # called while something is waited for; may raise to end that


@dataclasses.dataclass(frozen=True)
class Target:
    """What the library will run on. `libc` is "glibc" or "musl"; `version` its oldest, "2.31"."""

    machine: str
    libc: str = "glibc"
    version: str = ""
    cpu: str = ""  # builds for that core and its like alone; "" for the machine's baseline

    @property
    def triple(self) -> str:
        """As zig spells it: "aarch64-linux-gnu.2.31", "x86_64-linux-musl"."""
        if self.libc == "musl":
            return f"{self.machine}-linux-musl"
        return f"{self.machine}-linux-gnu" + (f".{self.version}" if self.version else "")

    @staticmethod
    def parse(triple: str, cpu: str = "") -> Target:
        """From "MACHINE-linux-gnu[.VERSION]" or "MACHINE-linux-musl". Raises BuildError."""
        match = re.fullmatch(r"(\w+)-linux-(?:(musl)|gnu(?:\.(\d+(?:\.\d+)+))?)", triple)
        if match is None:
            raise BuildError(
                f"target {triple!r}",
                expected='a target like "aarch64-linux-gnu.2.31" or "x86_64-linux-musl"',
                remedy="write it so (devices.yaml: toolchain.target)",
            )
        machine, musl, version = match.groups()
        return Target(machine_name(machine), "musl" if musl else "glibc", version or "", cpu)

    @staticmethod
    def local() -> Target:
        """This computer."""
        libc, version = platform.libc_ver()
        if libc == "glibc":
            return Target(machine_name(), "glibc", version)
        return Target(machine_name(), "musl")


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A C compiler. `kind`: "zig" | "gcc" | "clang"; `pinned`: ours, of a known version."""

    kind: str
    command: tuple[str, ...]  # what compiles and links, without arguments
    version: str
    flags: tuple[str, ...] = ()  # added to ours
    pinned: bool = False

    @property
    def name(self) -> str:
        """For people and records: "zig 0.17.1"."""
        return self.version if self.kind in self.version else f"{self.kind} {self.version}"


def zig_compiler(flags: Sequence[str] = ()) -> Compiler | None:
    """zig of the `ziglang` wheel in this environment, else the one on PATH, else None."""
    spec = importlib.util.find_spec("ziglang")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    candidates = [(str(Path(folder) / "zig"), True) for folder in folders]
    candidates.append((shutil.which("zig") or "", False))
    for path, pinned in candidates:
        if path and os.access(path, os.X_OK):
            version = _first_line([path, "version"])
            return Compiler("zig", (path, "cc"), f"zig {version}", tuple(flags), pinned)
    return None


def named_compiler(command: str, flags: Sequence[str] = ()) -> Compiler:
    """The compiler of that name, path or prefix ("aarch64-linux-gnu-"); "zig" is ours.

    Raises BuildError when it cannot be run.
    """
    if command == "zig":
        zig = zig_compiler(flags)
        if zig is None:
            raise BuildUnavailable(
                "no zig",
                expected="the ziglang package in this Python, or zig on PATH",
                remedy=f"run: {sys.executable} -m pip install ziglang",
            )
        return zig
    for candidate in (command, f"{command}gcc") if command.endswith("-") else (command,):
        path = shutil.which(os.path.expanduser(candidate))  # noqa: PTH111  pathlib refuses "~nobody"
        if path is None:
            continue
        text = _first_line([path, "--version"])
        kind = "clang" if "clang" in text else "gcc"
        return Compiler(kind, (path,), f"{Path(path).name}: {text}", tuple(flags))
    raise BuildError(
        f"no compiler {command!r}",
        expected="a C compiler on PATH or a path to one",
        remedy="install it on this host, or name another (devices.yaml: toolchain, "
        f"or {COMPILER_VARIABLE}); `zig` needs nothing but the ziglang package",
    )


def local_compiler(sanitize: str | None = None) -> Compiler:
    """What builds for this computer: $ENGINE_CC, else zig, else the system's compiler.

    With a sanitiser other than "undefined" the system's comes first: zig brings no runtime of
    theirs that can be preloaded. Raises BuildError when there is none.
    """
    named = os.environ.get(COMPILER_VARIABLE)
    if named:
        return named_compiler(named)
    zig = None if sanitize in ("address", "thread") else zig_compiler()
    if zig is not None:
        return zig
    for name in ("gcc", "clang", "cc"):
        if shutil.which(name):
            return named_compiler(name)
    raise BuildUnavailable(
        "no C compiler on this host",
        expected="gcc or clang" if sanitize else "the ziglang package, gcc or clang",
        remedy="install gcc" if sanitize else f"run: {sys.executable} -m pip install ziglang",
    )


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(
            f"{command[0]} cannot be run: {error}", remedy="install that compiler again"
        ) from error
    lines = (done.stdout or done.stderr).decode(errors="replace").split("\n")
    if done.returncode != 0 or not lines[0].strip():
        raise BuildError(
            f"{command[0]} {command[1]} ended with status {done.returncode}: {lines[0][:200]}",
            remedy="it is no C compiler, or it is damaged: name another",
        )
    return lines[0].strip()
