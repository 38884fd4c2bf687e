"""Builds the native library on the host, for this computer or for a board.

    python -m engine.native.build [--target aarch64-linux-gnu.2.31] [--compiler zig|COMMAND]
                                  [--sanitize address|thread|undefined] [--out FOLDER]

prints the library's path. `kernels.c` is compiled once for each instruction set of the target,
every other source once. A build is kept under the hash of what it is made of (sources, headers,
flags, compiler, sanitiser), appears whole or not at all, and is never made twice at a time.

Standard library alone. The compiler is zig's clang (the `ziglang` wheel) unless another is named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from engine.native.compilers import (
    BuildError,
    BuildUnavailable,
    Check,
    Compiler,
    Target,
    local_compiler,
    named_compiler,
)
from engine.native.isa import Isa, UnknownIsa, isas_of

SOURCES = Path(__file__).with_name("src")
LIBRARY = "libdecode_native.so"
RECORD = "build.json"  # beside the library: what it was made of
KERNELS = "kernels.c"
DEBUG_FOLDER = "/decode_native"  # where debuggers are told that the sources lie
SANITIZERS = ("address", "thread", "undefined")
CACHE_VARIABLE = "ENGINE_CACHE"
RECIPE = "1"  # raise it when the same inputs are built in another way
JOBS = 2  # compilers at a time: each of them may take 300 MB
KEPT_BUILDS = 30
COMPILE_S = 600.0
LOCK_S = 1200.0
POLL_S = 0.25
SHOWN_DIAGNOSTICS = 5

COMMON = ("-O3", "-std=c11", "-fPIC", "-pthread", "-g1")
# Same results on every path: no contraction to FMA that the source does not write, errno unused.
EXACT = ("-ffp-contract=off", "-fno-math-errno")
# gcc would call every function through the PLT otherwise.
VISIBLE = ("-fno-semantic-interposition",)
WARNINGS = ("-Wall", "-Wextra")
# -O1, after -O3: checks behind every access make that much code of inlined kernels that optimising
# it further takes minutes.
SANITIZE_FLAGS = {
    "address": ("-O1", "-fsanitize=address", "-fno-omit-frame-pointer"),
    "thread": ("-O1", "-fsanitize=thread", "-fno-omit-frame-pointer"),
    "undefined": ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
}


# --- command lines -------------------------------------------------------------------------------


def source_files(sources: Path = SOURCES) -> list[Path]:
    """The C files of a folder, sorted. Raises BuildError when `kernels.c` is not among them."""
    found = sorted(sources.glob("*.c"))
    if not any(path.name == KERNELS for path in found):
        raise BuildUnavailable(
            f"no {KERNELS} in {sources}", remedy="install the engine again: its sources are gone"
        )
    return found


def cpu_flags(target: Target, compiler: Compiler, isa: Isa) -> tuple[str, ...]:
    """What makes `compiler` produce code for `isa` on `target`, the target itself included."""
    if compiler.kind == "zig":
        base = {"x86_64": "x86_64", "aarch64": "generic"}[target.machine]
        cpu = (target.cpu or base).replace("-", "_")
        return ("-target", target.triple, f"-mcpu={cpu}{isa.zig}", *isa.zig_flags)
    if target.cpu and target.machine == "aarch64":
        # -mcpu takes extensions, not an architecture: "+dotprod+i8mm" of armv8.2-a+dotprod+i8mm.
        extensions = "".join(f"+{name}" for name in isa.march.split("+")[1:])
        return (f"-mcpu={target.cpu}{extensions}", *isa.flags)
    return (f"-march={target.cpu or isa.march}", *isa.flags)


def common_flags(compiler: Compiler, sanitize: str | None = None) -> tuple[str, ...]:
    """The same for every file. Warnings are errors for our own compiler alone: another's version
    may have new ones."""
    strict = ("-Werror",) if compiler.pinned else ()
    if compiler.kind == "gcc":  # vectors are passed among functions that are inlined anyway
        strict = ("-Wno-psabi", *strict)
    extra = SANITIZE_FLAGS[sanitize] if sanitize else ()
    if sanitize == "address" and compiler.kind == "gcc":  # checks as calls: half the time again
        extra = (*extra, "--param", "asan-instrumentation-with-call-threshold=0")
    return (*COMMON, *EXACT, *VISIBLE, *WARNINGS, *strict, *extra, *compiler.flags)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything a build consists of. Commands run in the folder of the sources."""

    compiles: tuple[tuple[str, tuple[str, ...]], ...]  # (object's name, command without -o OBJECT)
    link: tuple[str, ...]  # without objects and output
    output: str  # the file's name
    key: str  # the hash, 32 hex digits


def plan(
    target: Target,
    compiler: Compiler,
    *,
    sanitize: str | None = None,
    sources: Path = SOURCES,
    program: Path | None = None,
) -> Plan:
    """The commands of a build and its hash. With `program`, a C file that has `main`, it is a
    static program of that name around the library's code. Raises BuildError.
    """
    if sanitize is not None and sanitize not in SANITIZERS:
        raise BuildError(f"sanitiser {sanitize!r}", expected=f"one of {', '.join(SANITIZERS)}")
    if sanitize in ("address", "thread") and compiler.kind == "zig":
        raise BuildError(
            f"zig has no {sanitize} sanitiser for a library that Python loads",
            expected="gcc or clang",
            remedy="name one (--compiler gcc, for a board devices.yaml: toolchain: {kind: cc, …})",
        )
    try:
        isas = isas_of(target.machine)
    except UnknownIsa as error:
        raise BuildUnavailable(str(error)) from error
    common = common_flags(compiler, sanitize)
    compiles: list[tuple[str, tuple[str, ...]]] = []
    for path in [*source_files(sources), *([program.absolute()] if program else [])]:
        for isa in isas if path.name == KERNELS else isas[:1]:
            name = path.stem
            defines: tuple[str, ...] = ()
            if path.name == KERNELS:
                name = f"{path.stem}-{isa.name}"
                defines = (f"-DDN_ISA={isa.name}", f"-DDN_ISA_{isa.name.upper()}=1")
                if compiler.kind == "gcc" and isa is isas[0]:
                    # Vectors of 16 without such registers: gcc takes minutes to optimise them.
                    defines = ("-O1", *defines)
            flags = (*common, *cpu_flags(target, compiler, isa), *defines)
            source = ("-I.", str(path)) if path.parent != sources else (path.name,)
            compiles.append((f"{name}.o", (*compiler.command, *flags, "-c", *source)))
    link = [*compiler.command, *common, *cpu_flags(target, compiler, isas[0])]
    link += ["-static"] if program else ["-shared", f"-Wl,-soname,{LIBRARY}"]
    if sanitize is None and not program:
        link.append("-Wl,-z,defs")  # a function that nobody defines is found here, not on a board
    digest = hashlib.sha256()
    inputs: list[object] = [RECIPE, compiler.version, target.triple, target.cpu, sanitize]
    inputs += [[command[len(compiler.command) : -1] for _, command in compiles], link[1:]]
    digest.update(json.dumps(inputs).encode())
    contents = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*.[ch]")}
    if program:
        contents["/main"] = program
    for name, path in sorted(contents.items()):
        digest.update(f"\n{name}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    output = program.stem if program else LIBRARY
    return Plan(tuple(compiles), tuple(link), output, digest.hexdigest()[:32])


# --- building ------------------------------------------------------------------------------------


def build(
    target: Target,
    compiler: Compiler,
    out_dir: Path,
    sanitize: str | None = None,
    *,
    sources: Path = SOURCES,
    program: Path | None = None,
    check: Check | None = None,
) -> Path:
    """The library for `target`, built or as an earlier build left it: OUT_DIR/HASH/LIBRARY; with
    `program` (see `plan`) a program instead.

    `check` is called now and then meanwhile; what it raises ends the build. Raises BuildError with
    the compiler's first diagnostics, BuildUnavailable when this host cannot build it at all.
    """
    made = plan(target, compiler, sanitize=sanitize, sources=sources, program=program)
    out_dir.mkdir(parents=True, exist_ok=True)
    folder = out_dir / made.key
    result = folder / made.output
    if _whole(result):
        os.utime(folder)
        return result
    with _locked(out_dir / f".{made.key}.lock", check):
        if not _whole(result):  # else another process made it meanwhile
            _make(made, target, compiler, sanitize, sources, folder, check)
            _prune(out_dir)
    return result


def build_local(
    sources: Path | None = None,
    *,
    sanitize: str | None = None,
    compiler: Compiler | None = None,
) -> Path:
    """The library for this computer, from the user's cache. Raises BuildError."""
    return build(
        Target.local(),
        compiler or local_compiler(sanitize),
        cache_folder(),
        sanitize,
        sources=sources or SOURCES,
    )


def cache_folder() -> Path:
    """$ENGINE_CACHE, else below the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "native"
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "decode-harness" / "native"


def build_record(library: Path) -> dict[str, object]:
    """What the library was made of: hash, target, compiler, sanitize, isas, sha256. {} when it was
    not built here."""
    try:
        record = json.loads(library.with_name(RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _whole(result: Path) -> bool:
    record = build_record(result)
    try:
        data = result.read_bytes()
    except OSError:
        return False
    return record.get("sha256") == hashlib.sha256(data).hexdigest()


def _compile(
    made: Plan, compiler: Compiler, sources: Path, work: Path, check: Check | None
) -> list[str]:
    """All objects, below `work`."""
    # The hash in a file of its own, so that a compiler with a cache knows the others again.
    hashed = work / "hash.c"
    hashed.write_text(
        f'extern const char dn_build_hash[];\nconst char dn_build_hash[] = "{made.key}";\n'
    )
    flags = made.compiles[-1][1]
    own = (*flags[: flags.index("-c")], "-g0", "-c", str(hashed))
    # Not part of the build's hash: where this checkout lies. Without the map that would get into
    # the library, and two hosts would build two of them.
    place = f"-fdebug-prefix-map={sources.resolve()}={DEBUG_FOLDER}"

    def one(name: str, command: tuple[str, ...]) -> str:
        output = str(work / name)
        _call([*command, place, "-o", output], sources, compiler)
        return output

    with ThreadPoolExecutor(max_workers=min(JOBS, len(os.sched_getaffinity(0)))) as pool:
        running = [pool.submit(one, *item) for item in (*made.compiles, ("hash.o", own))]
        pending = set(running)
        try:
            while pending:
                done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if check is not None:
                    check()
        except BaseException:
            for future in pending:
                future.cancel()
            raise
        return [future.result() for future in running]


def _make(
    made: Plan,
    target: Target,
    compiler: Compiler,
    sanitize: str | None,
    sources: Path,
    folder: Path,
    check: Check | None,
) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as name:
        work = Path(name)
        objects = _compile(made, compiler, sources, work, check)
        result = work / "result"
        result.mkdir()
        command = [*made.link, *objects, "-lm", f"-Wl,--build-id=0x{made.key}"]
        _call([*command, "-o", str(result / made.output)], sources, compiler)
        data = (result / made.output).read_bytes()
        record = {
            "hash": made.key,
            "target": target.triple,
            "cpu": target.cpu,
            "compiler": compiler.name,
            "sanitize": sanitize,
            "isas": [isa.name for isa in isas_of(target.machine)],
            "sha256": hashlib.sha256(data).hexdigest(),
            "flags": list(made.link[len(compiler.command) :]),
        }
        (result / RECORD).write_text(json.dumps(record, indent=1))
        for path in result.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():  # damaged: _whole said so
            shutil.rmtree(folder)
        result.rename(folder)


def _call(command: Sequence[str], folder: Path, compiler: Compiler) -> None:
    """Run the compiler in `folder`. Raises BuildError with what it said first."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMPILE_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{compiler.name} did not end within {COMPILE_S:g} s", remedy="see what slows this host"
        ) from error
    if done.returncode != 0:
        text = first_diagnostics(done.stdout.decode(errors="replace"))
        what = next((word for word in command if word.endswith(".c")), "linking")
        raise BuildError(
            f"{compiler.name} ended with status {done.returncode} for {what}: {text}",
            remedy="repair the sources, or name another compiler or its flags",
        )


def first_diagnostics(text: str) -> str:
    """The first errors in what a compiler printed, else its first lines, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b|undefined (symbol|reference)", line)]
    shown = (errors or lines)[:SHOWN_DIAGNOSTICS]
    left = len(errors or lines) - len(shown)
    return " | ".join(shown) + (f" | and {left} more" if left > 0 else "") or "no message"


@contextlib.contextmanager
def _locked(path: Path, check: Check | None) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when its holder dies."""
    end = time.monotonic() + LOCK_S
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BuildError(
                        f"another process has been building for {LOCK_S:g} s ({path})",
                        remedy=f"see which one (`fuser {path}`), and end it if it hangs",
                    ) from None
                if check is not None:
                    check()
                time.sleep(POLL_S)
        yield


def _prune(out_dir: Path) -> None:
    """Remove the builds that were not used for longest, and what killed builds left. Whoever has a
    library open keeps it."""
    made = [path.parent for path in out_dir.glob(f"*/{RECORD}")]
    made.sort(key=lambda path: path.stat().st_mtime_ns)
    left = [path for path in out_dir.glob(".build-*") if path.stat().st_mtime < time.time() - 86400]
    for folder in [*made[:-KEPT_BUILDS], *left]:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of this module. 0, or 2 when nothing could be built."""
    parser = argparse.ArgumentParser(prog="python -m engine.native.build", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", help="default: this computer")
    parser.add_argument("--cpu", default="", help="build for this core alone, cortex_a76")
    parser.add_argument("--compiler", help="zig, a command, a path or a prefix; default: zig")
    parser.add_argument("--sanitize", choices=SANITIZERS)
    parser.add_argument("--out", type=Path, help="default: the user's cache")
    asked = parser.parse_args(arguments)
    try:
        target = Target.parse(asked.target) if asked.target else Target.local()
        target = dataclasses.replace(target, cpu=asked.cpu)
        compiler = (
            named_compiler(asked.compiler) if asked.compiler else local_compiler(asked.sanitize)
        )
        path = build(target, compiler, asked.out or cache_folder(), asked.sanitize)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
