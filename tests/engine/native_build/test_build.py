"""The native library is built once for each content, whole, for the target that was asked for."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.native import build as build_module
from engine.native.build import (
    LIBRARY,
    build,
    build_local,
    build_record,
    first_diagnostics,
    main,
    plan,
)
from engine.native.compilers import (
    BuildError,
    BuildUnavailable,
    Compiler,
    Target,
    local_compiler,
    named_compiler,
)
from engine.native.isa import isas_of
from harness.deploy.elf import read_elf

Copy = Callable[[str], Path]
HERE = Target.local()


def text(library: Path, function: str) -> str:
    call = getattr(ctypes.CDLL(str(library)), function)
    call.restype = ctypes.c_char_p
    return str(call().decode())


def test_kernels_are_compiled_for_every_instruction_set_of_this_machine(
    sources: Path, zig: Compiler, tmp_path: Path
) -> None:
    library = build(HERE, zig, tmp_path / "out", sources=sources)
    assert library.name == LIBRARY
    for isa in isas_of():
        assert text(library, f"macros_{isa.name}").split()[:2] == [isa.name, "x"]
    assert text(library, "build_hash") == library.parent.name == build_record(library)["hash"]
    if platform.machine() == "x86_64":
        assert text(library, "macros_generic") == "generic x"
        assert text(library, "macros_avx2") == "avx2 x fma avx2"
        assert text(library, "macros_avx512") == "avx512 x fma avx2 vnni"


def test_gcc_gives_the_same_kernels_their_instructions(
    sources: Path, gcc: Compiler, tmp_path: Path
) -> None:
    library = build(HERE, gcc, tmp_path / "out", sources=sources)
    if platform.machine() == "x86_64":
        assert text(library, "macros_avx512") == "avx512 x fma avx2 vnni"
        assert text(library, "macros_generic") == "generic x"


def test_the_same_content_is_built_once(sources: Path, calls: Any, tmp_path: Path) -> None:
    first = build(HERE, calls.compiler, tmp_path / "out", sources=sources)
    made = calls.count
    assert made == len(isas_of()) + 3  # one for each, runtime.c, the hash, linking
    assert build(HERE, calls.compiler, tmp_path / "out", sources=sources) == first
    assert calls.count == made


@pytest.mark.parametrize("change", ["kernels.c", "names.h", "flags", "sanitize", "target", "cpu"])
def test_whatever_a_library_is_made_of_changes_its_hash(
    sources: Path, gcc: Compiler, change: str
) -> None:
    before = plan(HERE, gcc, sources=sources).key
    target, compiler, sanitize = HERE, gcc, None
    if change in ("kernels.c", "names.h"):
        path = sources / change
        path.write_text(path.read_text() + "\n/* changed */\n")
    elif change == "flags":
        compiler = dataclasses.replace(gcc, flags=("-DX=1",))
    elif change == "sanitize":
        sanitize = "undefined"
    elif change == "target":
        target = dataclasses.replace(HERE, version="2.17")
    else:
        target = dataclasses.replace(HERE, cpu="native")
    assert plan(target, compiler, sanitize=sanitize, sources=sources).key != before


def test_two_checkouts_build_the_same_bytes(
    another_copy: Copy, zig: Compiler, tmp_path: Path
) -> None:
    made = [build(HERE, zig, tmp_path / f"out-{name}", sources=another_copy(name)) for name in "ab"]
    assert made[0].read_bytes() == made[1].read_bytes()
    assert str(tmp_path).encode() not in made[0].read_bytes()


def test_a_damaged_library_is_built_again(sources: Path, gcc: Compiler, tmp_path: Path) -> None:
    library = build(HERE, gcc, tmp_path / "out", sources=sources)
    whole = library.read_bytes()
    library.write_bytes(whole[:1000])
    assert build(HERE, gcc, tmp_path / "out", sources=sources) == library
    assert library.read_bytes() == whole


def test_two_builders_at_once_compile_once(sources: Path, calls: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(sources), str(calls.path), str(tmp_path / "out")]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {builder.communicate(timeout=120)[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(said) == 1
    assert calls.count == len(isas_of()) + 3


BUILD = """
import sys
from pathlib import Path
from engine.native.build import build
from engine.native.compilers import Target, named_compiler
sources, compiler, out = sys.argv[1:]
print(build(Target.local(), named_compiler(compiler), Path(out), sources=Path(sources)))
"""


def test_a_failed_build_shows_the_first_diagnostics_and_leaves_nothing(
    sources: Path, zig: Compiler, tmp_path: Path
) -> None:
    (sources / "runtime.c").write_text("int f(void) { return missing_name; }\n")
    with pytest.raises(BuildError, match=r"runtime\.c.*error.*missing_name") as caught:
        build(HERE, zig, tmp_path / "out", sources=sources)
    assert not isinstance(caught.value, BuildUnavailable)
    assert not list((tmp_path / "out").glob("*/*"))
    assert not list((tmp_path / "out").glob(".build-*"))


def test_a_function_that_nobody_defines_is_found_when_linking(
    sources: Path, zig: Compiler, tmp_path: Path
) -> None:
    (sources / "runtime.c").write_text("int nowhere(void);\nint f(void) { return nowhere(); }\n")
    with pytest.raises(BuildError, match=r"linking.*nowhere"):
        build(HERE, zig, tmp_path / "out", sources=sources)


def test_diagnostics_are_the_errors_first_and_counted_beyond_five() -> None:
    lines = "\n".join(["In file x:", *(f"a.c:{n}: error: e{n}" for n in range(7)), "note: n"])
    shown = first_diagnostics(lines)
    assert shown.startswith("a.c:0: error: e0 | ")
    assert shown.endswith("e4 | and 2 more")
    assert first_diagnostics("cannot start\n") == "cannot start"
    assert first_diagnostics("") == "no message"


def test_waiting_for_a_compiler_can_be_ended(sources: Path, gcc: Compiler, tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        build(HERE, gcc, tmp_path / "out", sources=sources, check=stop)
    assert not list((tmp_path / "out").glob("*/*"))


def test_old_builds_and_what_killed_ones_left_are_removed(
    sources: Path, gcc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "KEPT_BUILDS", 2)
    out = tmp_path / "out"
    left = out / ".build-killed"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    made = []
    for number in range(3):
        (sources / "names.h").write_text(f'#define NAMES "{number}"\n')
        made.append(build(HERE, gcc, out, sources=sources))
    assert [path.exists() for path in made] == [False, True, True]
    assert not left.exists()


def test_a_static_program_around_the_library_runs_without_it(
    sources: Path, zig: Compiler, tmp_path: Path
) -> None:
    main_c = tmp_path / "asker.c"
    main_c.write_text(
        '#include <stdio.h>\n#include "names.h"\nconst char *build_hash(void);\n'
        'int main(void) { printf("%s %s", NAMES, build_hash()); return 0; }\n'
    )
    target = Target(HERE.machine, "musl")
    made = build(target, zig, tmp_path / "out", sources=sources, program=main_c)
    said = subprocess.run([made], capture_output=True, text=True, check=True).stdout
    assert said == f"x {made.parent.name}"
    assert made.parent != build(target, zig, tmp_path / "out", sources=sources).parent


# --- targets and compilers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("triple", "machine", "needs"),
    [
        ("x86_64-linux-gnu.2.17", "x86_64", "GLIBC_2.2.5"),
        ("aarch64-linux-gnu.2.28", "aarch64", "GLIBC_2.27"),
        ("aarch64-linux-musl", "aarch64", None),
    ],
)
def test_zig_builds_for_the_exact_target(
    triple: str, machine: str, needs: str | None, sources: Path, zig: Compiler, tmp_path: Path
) -> None:
    library = build(Target.parse(triple), zig, tmp_path / "out", sources=sources)
    found = read_elf(library)
    assert found.machine == machine
    assert found.name == LIBRARY
    versions = {symbol: need.version for need in found.needs for symbol in need.symbols}
    assert versions.get("expf") == needs


@pytest.mark.parametrize(
    "triple",
    ["x86_64-linux-gnu", "x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.31", "aarch64-linux-musl"],
)
def test_a_target_is_read_and_written_the_same(triple: str) -> None:
    assert Target.parse(triple).triple == triple


@pytest.mark.parametrize(
    "triple", ["", "aarch64", "aarch64-linux", "aarch64-windows-gnu", "x86_64-linux-gnu.2", "a b"]
)
def test_a_target_in_another_form_is_refused(triple: str) -> None:
    with pytest.raises(BuildError, match=r'expected a target like "aarch64-linux-gnu\.2\.31"'):
        Target.parse(triple)


def test_a_machine_without_kernels_cannot_be_built_for(sources: Path, gcc: Compiler) -> None:
    with pytest.raises(BuildUnavailable, match="riscv64"):
        plan(Target("riscv64"), gcc, sources=sources)


def test_a_prefix_names_the_gcc_behind_it(tmp_path: Path, gcc: Compiler) -> None:
    (tmp_path / "board-gcc").symlink_to(gcc.command[0])
    assert named_compiler(f"{tmp_path}/board-").command == (f"{tmp_path}/board-gcc",)


def test_a_named_compiler_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no compiler 'absent-gcc'.*install it"):
        named_compiler("absent-gcc")
    with pytest.raises(BuildError, match="ended with status 1"):
        named_compiler("false")


def test_without_any_compiler_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("ENGINE_CC", raising=False)
    with pytest.raises(BuildUnavailable, match=r"no C compiler.*pip install ziglang"):
        local_compiler()


def test_the_environment_names_the_compiler_of_local_builds(
    sources: Path, calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CC", str(calls.path))
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    library = build_local(sources)
    assert library.is_relative_to(tmp_path / "cache" / "native")
    assert calls.count > 0


def test_missing_sources_are_told(tmp_path: Path, gcc: Compiler) -> None:
    with pytest.raises(BuildUnavailable, match=r"no kernels\.c"):
        plan(HERE, gcc, sources=tmp_path)


def test_the_command_says_where_the_library_is_or_why_there_is_none(
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    gcc: Compiler,
) -> None:
    del gcc  # it must be there
    monkeypatch.setattr(build_module, "build", lambda *args: build(*args, sources=sources))
    assert main(["--compiler", "gcc", "--out", str(tmp_path / "out")]) == 0
    assert Path(capsys.readouterr().out.strip()).name == LIBRARY
    assert main(["--target", "nowhere"]) == 2
    assert "expected a target like" in capsys.readouterr().err
