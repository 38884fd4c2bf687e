"""Libraries that compilers made, against boards that are older than this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.native.build import build_record
from engine.native.compilers import BuildError, Compiler, Target, named_compiler
from harness.boards.facts import Facts
from harness.deploy.elf import newest_version, read_elf
from harness.deploy.native import native_build, sanitizer_runtime
from harness.errors import BoardError
from harness.inventory.schema import Toolchain

HERE = Target.local()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


def board(libc: str, machine: str = HERE.machine) -> Facts:
    return Facts(machine=machine, kernel="Linux 6.1", libc=libc)


@pytest.mark.parametrize(
    ("machine", "libc"),
    [("x86_64", "glibc 2.17"), ("aarch64", "glibc 2.31"), ("aarch64", "musl 1.2.4")],
)
def test_zig_builds_what_an_old_board_can_load(
    machine: str, libc: str, sources: Path, zig: Compiler
) -> None:
    made = native_build(board(libc, machine), "rk-1", sources=sources)
    found = read_elf(made.library)
    assert found.machine == machine
    newest = newest_version(found.needs, "GLIBC_")
    if libc.startswith("glibc"):
        assert newest is not None
        minor = int(newest.version.split(".")[1])
        assert minor <= int(libc.split(".")[1])
    else:
        assert newest is None
    assert made.compiler == zig.name
    assert made.hash == build_record(made.library)["hash"]
    assert made.sanitize is None


def test_a_named_compiler_that_links_with_a_newer_libc_is_refused_for_the_board(
    sources: Path, gcc: Compiler
) -> None:
    toolchain = Toolchain(kind="cc", command="gcc")
    made = native_build(board(f"{HERE.libc} {HERE.version}"), "here", toolchain, sources=sources)
    newest = newest_version(read_elf(made.library).needs, "GLIBC_")
    if newest is None or newest.version == "GLIBC_2.17":
        pytest.skip("the libc of this host is older than any board's")
    with pytest.raises(BoardError, match=rf"needs {newest.version} of \S+ \(\w+.*glibc 2\.17"):
        native_build(board("glibc 2.17"), "old", toolchain, sources=sources)


def test_a_compiler_for_another_machine_is_told_by_its_own_words_or_by_the_library(
    sources: Path, gcc: Compiler
) -> None:
    other = "aarch64" if HERE.machine == "x86_64" else "x86_64"
    with pytest.raises((BuildError, BoardError), match=r"error|built for"):
        native_build(
            board("glibc 2.36", other), "rk-1", Toolchain(kind="cc", command="gcc"), sources=sources
        )


def test_flags_of_the_toolchain_reach_the_compiler(sources: Path, gcc: Compiler) -> None:
    toolchain = Toolchain(kind="cc", command="gcc", flags=("-DNAMES_ARE_WRONG", "-include", "x.h"))
    with pytest.raises(BuildError, match=r"x\.h: No such file"):
        native_build(board(f"{HERE.libc} {HERE.version}"), "here", toolchain, sources=sources)


def test_a_cpu_makes_everything_for_that_core(sources: Path, zig: Compiler) -> None:
    toolchain = Toolchain(kind="zig", target="aarch64-linux-gnu.2.31", cpu="cortex-a76")
    made = native_build(board("glibc 2.31", "aarch64"), "rk-1", toolchain, sources=sources)
    assert build_record(made.library)["cpu"] == "cortex-a76"
    plain = native_build(board("glibc 2.31", "aarch64"), "rk-1", sources=sources)
    assert made.hash != plain.hash


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_the_runtime_of_a_sanitiser_comes_with_what_it_needs(
    sanitize: str, sources: Path, gcc: Compiler
) -> None:
    here = board(f"{HERE.libc} {HERE.version}")
    made = native_build(here, "here", sanitize=sanitize, sources=sources)
    first, *_ = names = [name for name, _ in made.files()][1:]
    assert first.startswith(f"native_lib/lib{sanitize[0]}san.so.")
    assert any("libgcc_s" in name for name in names)
    assert not any("libc.so" in name or "libm.so" in name for name in names)


def test_a_compiler_without_the_runtime_is_told(tmp_path: Path) -> None:
    bare = tmp_path / "bare-gcc"
    bare.write_text('#!/bin/sh\ncase "$1" in --version) echo bare 1;; *) echo libasan.so;; esac\n')
    bare.chmod(0o755)
    with pytest.raises(BuildError, match=r"has no libasan\.so; expected the runtime"):
        sanitizer_runtime("address", named_compiler(str(bare)))
