"""The native library of a board: built on the host, checked against the board, packed as a part.

Without anything in devices.yaml it is built by zig for the board's machine and libc. Where that
cannot be done the board goes without, and the result says why: its numpy units work as ever. What
`toolchain:` names must work: then trouble is an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.native.build import SOURCES, build, build_record
from engine.native.compilers import (
    BuildError,
    Compiler,
    Target,
    local_compiler,
    named_compiler,
)
from engine.native.isa import MACHINES
from harness.deploy.elf import newer_than, read_elf
from harness.errors import BoardError
from harness.paths import cache_dir

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.inventory.schema import Toolchain

FOLDER = "native_lib"  # in the part; the engine looks for it on sys.path
NEWEST_GLIBC = (2, 38)  # nothing newer is used, and a compiler may not know a newer one yet
_RUNTIMES = {"address": "asan", "thread": "tsan"}
# Of the system everywhere: never sent along.
_SYSTEM = ("libc.", "libm.", "libdl.", "libpthread.", "librt.", "ld-linux", "ld-musl")
# A request for more memory than there is fails as it does without a sanitiser.
_COMMON = "abort_on_error=1:allocator_may_return_null=1"
OPTIONS: Mapping[str, Mapping[str, str]] = {
    # Python frees little at its end, and numpy's threads are not instrumented.
    "address": {"ASAN_OPTIONS": f"{_COMMON}:detect_leaks=0"},
    "thread": {"TSAN_OPTIONS": f"{_COMMON}:halt_on_error=1:ignore_noninstrumented_modules=1"},
    "undefined": {"UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1"},
}


@dataclasses.dataclass(frozen=True)
class NativeBuild:
    """A library and how it came about. `runtime`: what must be preloaded first, with the libraries
    it needs; () without a sanitiser, or with one that needs nothing."""

    library: Path
    target: str
    compiler: str
    hash: str  # of sources, flags, compiler and sanitiser
    sanitize: str | None = None
    runtime: tuple[Path, ...] = ()

    def files(self) -> list[tuple[str, bytes]]:
        """(name, content) of what goes to the board."""
        return [(f"{FOLDER}/{name}", path.read_bytes()) for name, path in self._named()]

    def environment(self, folder: str) -> dict[str, str]:
        """What a sanitised engine needs in its environment; `folder` holds `files()`."""
        if self.sanitize is None:
            return {}
        preload = ":".join(f"{folder}/{FOLDER}/{name}" for name, _ in self._named()[1:])
        return {**OPTIONS[self.sanitize], **({"LD_PRELOAD": preload} if preload else {})}

    def _named(self) -> list[tuple[str, Path]]:
        """The libraries by the names that the loader looks for."""
        runtime = [(read_elf(path).name or path.name, path) for path in self.runtime]
        return [(self.library.name, self.library), *runtime]


def native_build(
    facts: Facts,
    board: str,
    toolchain: Toolchain | None = None,
    *,
    sanitize: str | None = None,
    sources: Path = SOURCES,
    check: Callable[[], None] | None = None,
) -> NativeBuild:
    """The library for a board of these facts, built or from the cache, and checked against them.

    Raises BuildError when it cannot be built, BoardError "deploy" when the board cannot load it.
    """
    target = board_target(facts, toolchain)
    compiler = board_compiler(toolchain, target, sanitize)
    library = build(target, compiler, cache_dir("native"), sanitize, sources=sources, check=check)
    check_library(library, facts, board)
    return NativeBuild(
        library=library,
        target=target.triple,
        compiler=compiler.name,
        hash=str(build_record(library).get("hash", "")),
        sanitize=sanitize,
        runtime=sanitizer_runtime(sanitize, compiler),
    )


def board_target(facts: Facts, toolchain: Toolchain | None = None) -> Target:
    """What `toolchain` says, else what the board is. Raises BuildError."""
    cpu = (toolchain.cpu if toolchain is not None else None) or ""
    if toolchain is not None and toolchain.target:
        return Target.parse(toolchain.target, cpu)
    if facts.machine not in MACHINES:
        raise BuildError(
            f"no kernels for machine {facts.machine!r}", expected=" or ".join(MACHINES)
        )
    libc, _, version = facts.libc.partition(" ")
    if libc == "musl":
        return Target(facts.machine, "musl", "", cpu)
    numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", version)
    if libc != "glibc" or numbers is None:
        raise BuildError(f"libc {facts.libc!r}", expected="glibc or musl with a version")
    major, minor = min((int(numbers[1]), int(numbers[2])), NEWEST_GLIBC)
    return Target(facts.machine, "glibc", f"{major}.{minor}", cpu)


def board_compiler(
    toolchain: Toolchain | None, target: Target, sanitize: str | None = None
) -> Compiler:
    """The compiler that `toolchain` names, else zig. Raises BuildError.

    A sanitiser of addresses or threads needs gcc or clang, with its runtime for the board: this
    host's own for a board of the same machine.
    """
    if toolchain is not None:
        return named_compiler(toolchain.command or "zig", toolchain.flags)
    if sanitize not in _RUNTIMES:
        return named_compiler("zig")
    if target.machine != Target.local().machine or target.libc != Target.local().libc:
        raise BuildError(
            f"no {sanitize} sanitiser for {target.triple} on this host",
            expected="a gcc or clang that builds for that board",
            remedy="install one (Debian: gcc-aarch64-linux-gnu) and name it in devices.yaml: "
            "toolchain: {kind: cc, command: aarch64-linux-gnu-gcc}",
        )
    return local_compiler(sanitize)


def check_library(library: Path, facts: Facts, board: str) -> None:
    """Whether the board can load it: its machine, its libc, and no version newer than it has.

    Raises BoardError "deploy".
    """
    found = read_elf(library)
    if found.machine != facts.machine:
        raise BoardError(
            board,
            "deploy",
            f"the native library is built for {found.machine}",
            expected=f"one for {facts.machine}",
            remedy="correct toolchain (target or command) in devices.yaml",
        )
    libc, _, version = facts.libc.partition(" ")
    needs_glibc = any(name.startswith("libc.so.6") for name in found.libraries)
    needs_musl = any(name.startswith(("libc.musl-", "libc.so")) for name in found.libraries)
    if (libc == "musl" and needs_glibc) or (libc == "glibc" and needs_musl and not needs_glibc):
        raise BoardError(
            board,
            "deploy",
            f"the native library is linked with {'glibc' if needs_glibc else 'musl'}",
            expected=f"{facts.libc}, which the board has",
            remedy="correct toolchain.target in devices.yaml, or leave it out",
        )
    late = newer_than(found.needs, "GLIBC_", version) if libc == "glibc" else ()
    if late:
        symbols = ", ".join(late[0].symbols[:4]) or "no symbol named"
        wanted = late[0].version.removeprefix("GLIBC_")
        raise BoardError(
            board,
            "deploy",
            f"the native library needs {late[0].version} of {late[0].library} ({symbols})",
            expected=f"at most {facts.libc}, which the board has",
            remedy=f"build it against an older libc than {wanted}: toolchain: {{kind: zig, target: "
            f"{facts.machine}-linux-gnu.{version}}} in devices.yaml, or leave toolchain out",
        )


# --- sanitisers ----------------------------------------------------------------------------------


def sanitizer_runtime(sanitize: str | None, compiler: Compiler) -> tuple[Path, ...]:
    """The libraries that a process must preload to use a sanitised library, the runtime first.

    () where none is needed. Raises BuildError when the compiler has no such runtime.
    """
    if sanitize not in _RUNTIMES or compiler.kind == "zig":
        return ()
    if compiler.kind == "clang":
        machine = _ask(compiler, "-dumpmachine").split("-")[0]
        name = f"libclang_rt.{_RUNTIMES[sanitize]}-{machine}.so"
    else:
        name = f"lib{_RUNTIMES[sanitize]}.so"
    first = _library(compiler, name)
    if first is None:
        raise BuildError(
            f"{compiler.name} has no {name}",
            expected=f"the runtime of its {sanitize} sanitiser as a shared library",
            remedy="install it (Debian: it comes with gcc; libclang-rt-dev for clang)",
        )
    found = [first]
    for path in found:  # grows while it is walked
        for needed in read_elf(path).libraries:
            extra = None if needed.startswith(_SYSTEM) else _library(compiler, needed)
            if extra is not None and extra not in found:
                found.append(extra)
    return tuple(found)


def _library(compiler: Compiler, name: str) -> Path | None:
    """Where the compiler has a library; None without, or for a text that stands in for one."""
    answer = Path(_ask(compiler, f"-print-file-name={name}"))
    if not answer.is_absolute() or not answer.is_file():
        return None
    with answer.open("rb") as file:
        return answer.resolve() if file.read(4) == b"\x7fELF" else None


def _ask(compiler: Compiler, question: str) -> str:
    try:
        done = subprocess.run(
            [*compiler.command, question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler.name} does not answer {question}: {error}") from error
    return done.stdout.strip()


def sanitizer_environment(
    sanitize: str,
    library: Path,
    compiler: Compiler | None = None,
    *,
    options: Sequence[str] = (),
) -> dict[str, str]:
    """The environment of a Python process on this host that uses a sanitised build `library`.

    `compiler` made it (that of this host by default); `options` are added to the sanitiser's, like
    "log_path=FILE". Raises BuildError.
    """
    made_by = compiler or local_compiler(sanitize)
    variable, usual = next(iter(OPTIONS[sanitize].items()))
    environment = {
        **os.environ,
        "ENGINE_NATIVE_LIB": str(library),
        variable: ":".join([usual, *options]),
    }
    runtime = sanitizer_runtime(sanitize, made_by)
    if runtime:
        environment["LD_PRELOAD"] = str(runtime[0])
    return environment
