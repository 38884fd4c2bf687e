"""The native library that a board gets: for which target, by which compiler, when refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.native.compilers import BuildError, Target
from harness.boards.facts import Facts
from harness.deploy.native import (
    NativeBuild,
    board_compiler,
    board_target,
    check_library,
    native_build,
)
from harness.errors import BoardError
from harness.inventory.schema import Toolchain

MakeLibrary = Callable[..., Path]


@pytest.fixture
def library(small_elf: Callable[..., bytes], tmp_path: Path) -> MakeLibrary:
    def make(**made: object) -> Path:
        path = tmp_path / "libdecode_native.so"
        path.write_bytes(small_elf(**made))
        return path

    return make


def board(facts: Facts, **changes: object) -> Facts:
    return facts.model_copy(update=changes)


@pytest.mark.parametrize(
    ("machine", "libc", "triple"),
    [
        ("aarch64", "glibc 2.31", "aarch64-linux-gnu.2.31"),
        ("x86_64", "glibc 2.17", "x86_64-linux-gnu.2.17"),
        ("aarch64", "musl 1.2.4", "aarch64-linux-musl"),
        ("aarch64", "glibc 2.99", "aarch64-linux-gnu.2.38"),  # newer than compilers know
        ("aarch64", "glibc 2.31.9000", "aarch64-linux-gnu.2.31"),
    ],
)
def test_a_board_is_built_for_by_its_machine_and_libc(
    machine: str, libc: str, triple: str, facts: Facts
) -> None:
    assert board_target(board(facts, machine=machine, libc=libc)).triple == triple


@pytest.mark.parametrize(
    ("machine", "libc", "found"),
    [
        ("armv7l", "glibc 2.31", "no kernels for machine 'armv7l'"),
        ("aarch64", "bionic", "libc 'bionic'"),
        ("aarch64", "", "libc ''"),
    ],
)
def test_a_board_that_cannot_be_built_for_is_told(
    machine: str, libc: str, found: str, facts: Facts
) -> None:
    with pytest.raises(BuildError, match=f"{found}; expected"):
        board_target(board(facts, machine=machine, libc=libc))


def test_a_toolchain_names_target_cpu_and_compiler(facts: Facts) -> None:
    zig = Toolchain(kind="zig", target="aarch64-linux-gnu.2.28", cpu="cortex_a76")
    assert board_target(facts, zig) == Target("aarch64", "glibc", "2.28", "cortex_a76")
    named = Toolchain(kind="cc", command="gcc", flags=("-DX=1",))
    if importlib.util.find_spec("ziglang") is not None:
        assert board_compiler(zig, Target.local()).kind == "zig"
    try:
        compiler = board_compiler(named, Target.local())
    except BuildError:
        pytest.skip("needs gcc")
    assert (compiler.kind, compiler.flags) == ("gcc", ("-DX=1",))


def test_a_named_compiler_that_is_missing_is_an_error_with_its_remedy(facts: Facts) -> None:
    named = Toolchain(kind="cc", command="aarch64-nowhere-gcc")
    with pytest.raises(BuildError, match=r"'aarch64-nowhere-gcc'.*devices\.yaml: toolchain"):
        native_build(facts, "rk-1", named)


def test_sanitising_another_machine_asks_for_its_compiler(facts: Facts) -> None:
    other = "x86_64" if Target.local().machine == "aarch64" else "aarch64"
    target = Target(other, "glibc", "2.31")
    with pytest.raises(BuildError, match=r"no address sanitiser.*kind: cc"):
        board_compiler(None, target, "address")


# --- the check against the board -----------------------------------------------------------------


def test_a_version_that_the_board_has_passes(facts: Facts, library: MakeLibrary) -> None:
    check_library(library(), board(facts, libc="glibc 2.34"), "rk-1")


def test_a_symbol_newer_than_the_boards_libc_is_named_with_its_version(
    facts: Facts, library: MakeLibrary
) -> None:
    path = library(version="GLIBC_2.34", symbol="pthread_create")
    with pytest.raises(BoardError) as caught:
        check_library(path, board(facts, libc="glibc 2.31"), "rk-1")
    assert caught.value.kind == "deploy"
    assert caught.value.found == (
        "the native library needs GLIBC_2.34 of libc.so.6 (pthread_create)"
    )
    assert caught.value.expected == "at most glibc 2.31, which the board has"
    assert "target: aarch64-linux-gnu.2.31}" in caught.value.remedy


def test_a_library_of_another_machine_or_libc_is_refused(
    facts: Facts, library: MakeLibrary
) -> None:
    with pytest.raises(BoardError, match="built for x86_64; expected one for aarch64"):
        check_library(library(machine=62), facts, "rk-1")
    with pytest.raises(BoardError, match=r"linked with glibc; expected musl 1\.2\.4"):
        check_library(library(), board(facts, libc="musl 1.2.4"), "rk-1")


def test_what_a_sanitised_engine_preloads_is_sent_along(
    library: MakeLibrary, small_elf: Callable[..., bytes], tmp_path: Path
) -> None:
    runtime = tmp_path / "libasan.so.8.0.0"
    runtime.write_bytes(small_elf())
    made = NativeBuild(library(), "t", "gcc", "0", "address", (runtime,))
    # By the name that the loader looks for, which the file tells (libx.so in this sample).
    assert [name for name, _ in made.files()] == [
        "native_lib/libdecode_native.so",
        "native_lib/libx.so",
    ]
    environment = made.environment("/parts/1")
    assert environment["LD_PRELOAD"] == "/parts/1/native_lib/libx.so"
    assert "detect_leaks=0" in environment["ASAN_OPTIONS"]
    plain = NativeBuild(library(), "t", "zig", "0")
    assert plain.environment("/parts/1") == {}
