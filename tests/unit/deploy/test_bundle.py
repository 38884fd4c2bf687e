"""Bundles: the same sources give the same bytes; wheels are taken apart with care."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.native.compilers import BuildError
from harness.boards.facts import Facts
from harness.deadline import Deadline
from harness.deploy import bundle
from harness.deploy.bundle import (
    build_bundle,
    engine_files,
    locked_libc,
    locked_requirement,
    pack_wheel,
    plain_tar,
)
from harness.deploy.native import NativeBuild
from harness.deploy.registry import NoSuchWheel
from harness.errors import BoardError, HarnessError
from harness.inventory.schema import Toolchain

MakeWheel = Callable[..., Path]


def names(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_the_same_sources_give_the_same_bytes_whatever_their_times(tmp_path: Path) -> None:
    for folder, when in ((tmp_path / "a", 1), (tmp_path / "b", 2_000_000_000)):
        (folder / "units").mkdir(parents=True)
        for name in ("__init__.py", "units/packed.py"):
            (folder / name).write_text(f"# {name}\n")
            os.utime(folder / name, (when, when))
    (tmp_path / "b" / "units" / "packed.py").chmod(0o700)
    (tmp_path / "b" / "__pycache__").mkdir()
    (tmp_path / "b" / "__pycache__" / "x.py").write_text("")
    (tmp_path / "b" / "tests").mkdir()
    (tmp_path / "b" / "tests" / "test_x.py").write_text("")
    tars = [plain_tar(engine_files(tmp_path / name)) for name in "ab"]
    assert tars[0] == tars[1]
    (tmp_path / "a" / "__init__.py").write_text("# changed\n")
    assert plain_tar(engine_files(tmp_path / "a")) != tars[0]


def test_the_first_entry_of_a_lock_file_that_fits_the_boards_python_is_taken(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "wheels.lock"
    one, two, three = "1" * 64, "2" * 64, "3" * 64
    lock.write_text(
        f"numpy-extra==9 \\\n    --hash=sha256:{'9' * 64}\n"
        f'numpy==2.0.2 ; python_version < "3.10" \\\n    --hash=sha256:{three}\n'
        f"numpy==2.4.6 \\\n    --hash=sha256:{one} \\\n    --hash=sha256:{two}\n"
    )
    assert locked_requirement("numpy", "3.9", lock) == ("2.0.2", [three])
    assert locked_requirement("numpy", "3.13", lock) == ("2.4.6", [one, two])
    with pytest.raises(HarnessError, match=r"no psutil==VERSION with hashes for Python 3\.9"):
        locked_requirement("psutil", "3.9", lock)
    with pytest.raises(HarnessError, match="cannot be read"):
        locked_requirement("psutil", "3.9", tmp_path / "absent")


def test_every_python_from_3_9_on_has_its_wheels_locked() -> None:
    for python in ("3.9", "3.10", "3.11", "3.12", "3.13"):
        for name in bundle.BOARD_WHEELS:
            version, hashes = locked_requirement(name, python)
            assert version[0].isdigit()
            assert len(hashes) > 10
            assert set(locked_libc(name, version)) == {"glibc", "musl"}
    assert locked_requirement("numpy", "3.9")[0] == "2.0.2"  # the last that supports it


def test_a_wheel_is_packed_without_tests_stubs_and_headers(
    make_wheel: MakeWheel, tmp_path: Path
) -> None:
    wheel = make_wheel(
        {
            "demo/__init__.py": b"x = 1\n",
            "demo/tests.py": b"# a module of that name stays\n",
            "demo/core.abi3.so": b"\x7fELF",
            "demo.libs/libblas.so": b"\x7fELF",
            "demo/tests/test_x.py": b"",
            "demo/__init__.pyi": b"",
            "demo/_core/include/demo.h": b"",
            "demo-1.0.data/purelib/other.py": b"",
            "demo-1.0.data/scripts/run": b"",
            "demo-1.0.dist-info/licenses/LICENSE": b"free",
        }
    )
    first, second = tmp_path / "1.tar.gz", tmp_path / "2.tar.gz"
    pack_wheel(wheel, first)
    pack_wheel(wheel, second)
    assert names(first) == [
        "demo-1.0.dist-info/licenses/LICENSE",
        "demo.libs/libblas.so",
        "demo/__init__.py",
        "demo/core.abi3.so",
        "demo/tests.py",
        "other.py",
    ]
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("member", ["../evil.py", "/etc/evil.py", "a/../../evil.py", "a\\b.py"])
def test_a_wheel_that_would_leave_its_folder_is_refused(
    make_wheel: MakeWheel, tmp_path: Path, member: str
) -> None:
    wheel = make_wheel({member: b""})
    with pytest.raises(HarnessError, match="unsafe member"):
        pack_wheel(wheel, tmp_path / "x.tar.gz")
    assert not (tmp_path / "x.tar.gz").exists()


class Registry:
    """Hands out wheels made here, and remembers what it was asked."""

    def __init__(self, make_wheel: MakeWheel) -> None:
        self.make_wheel = make_wheel
        self.asked: list[tuple[str, ...]] = []

    def __call__(
        self,
        requirement: str,
        hashes: Sequence[str],
        folder: Path,
        *,
        arguments: Sequence[str],
        deadline: Deadline,
        check: Callable[[], None] | None,
    ) -> Path:
        if check is not None:
            check()
        self.asked.append((requirement, *arguments))
        name = requirement.partition("==")[0]
        wheel = self.make_wheel({f"{name}/__init__.py": name.encode()}, f"{name}.whl")
        return wheel.replace(folder / wheel.name)


@pytest.fixture
def registry(make_wheel: MakeWheel, monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry(make_wheel)
    monkeypatch.setattr(bundle, "download_wheel", found)
    return found


def test_wheels_are_those_of_the_board_and_are_fetched_once(
    cache: Path, facts: Facts, registry: Registry
) -> None:
    first = build_bundle(facts)
    assert [part.kind for part in first.parts] == ["engine", "wheel", "wheel"]
    (numpy, *arguments), _ = registry.asked
    assert numpy == f"numpy=={locked_requirement('numpy', '3.11')[0]}"
    options = " ".join(arguments)
    assert "--python-version 3.11" in options
    assert "--abi cp311" in options
    assert "--platform manylinux2014_aarch64" in options
    for part in first.parts:
        assert hashlib.sha256(part.path.read_bytes()).hexdigest() == part.sha256
        assert part.bytes == part.path.stat().st_size
    assert build_bundle(facts) == first
    assert len(registry.asked) == 2
    first.parts[1].path.write_bytes(b"damaged")
    assert build_bundle(facts) == first
    assert len(registry.asked) == 3


def test_a_board_of_another_kind_gets_wheels_of_its_own(
    cache: Path, facts: Facts, registry: Registry
) -> None:
    assert facts.python is not None
    build_bundle(facts)
    python = facts.python.model_copy(update={"abi": "cp313", "version": "3.13.1"})
    other = build_bundle(facts.model_copy(update={"python": python}))
    assert len(registry.asked) == 4
    assert other.engine_hash == build_bundle(facts).engine_hash


def test_no_wheel_for_the_boards_python_is_an_error_with_a_remedy(
    cache: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> Path:
        raise NoSuchWheel("no wheel of numpy==2.4.6 fits (the newest that does: 2.0.2)")

    monkeypatch.setattr(bundle, "download_wheel", refuse)
    with pytest.raises(BoardError, match=r"newest that does: 2\.0\.2") as caught:
        build_bundle(facts, "rk-01")
    assert (caught.value.kind, caught.value.board) == ("deploy", "rk-01")
    assert "newer Python" in caught.value.remedy


@pytest.mark.parametrize(
    ("python", "tag", "words"),
    [
        ("3.11.2", "manylinux_2_17_aarch64", ("glibc 2.17", "numpy 2.4.6", "glibc 2.27")),
        ("3.9.2", "manylinux_2_5_x86_64", ("glibc 2.5", "numpy 2.0.2", "glibc 2.17")),
        ("3.12.1", "musllinux_1_1_aarch64", ("musl 1.1", "numpy 2.4.6", "musl 1.2")),
    ],
)
def test_a_board_with_too_old_a_libc_is_refused_before_anything_is_fetched(
    cache: Path,
    facts: Facts,
    registry: Registry,
    python: str,
    tag: str,
    words: tuple[str, ...],
) -> None:
    assert facts.python is not None
    old = facts.python.model_copy(update={"version": python, "platform_tags": (tag,)})
    with pytest.raises(BoardError) as caught:
        build_bundle(facts.model_copy(update={"python": old}), "rk-01")
    assert (caught.value.kind, caught.value.board) == ("deploy", "rk-01")
    assert all(word in str(caught.value) for word in words)
    assert caught.value.remedy
    assert registry.asked == []


@pytest.mark.parametrize("tag", ["manylinux_2_27_aarch64", "musllinux_1_2_x86_64"])
def test_a_libc_just_new_enough_is_taken(
    cache: Path, facts: Facts, registry: Registry, tag: str
) -> None:
    assert facts.python is not None
    python = facts.python.model_copy(update={"platform_tags": (tag,)})
    assert len(build_bundle(facts.model_copy(update={"python": python})).parts) == 3


@pytest.mark.parametrize(
    ("python", "kind", "words"),
    [
        (None, "no-python", "no python3"),
        ({"version": "3.8.10"}, "no-python", "is Python 3.8.10"),
        ({"platform_tags": ()}, "deploy", "libc"),
    ],
)
def test_a_board_whose_python_cannot_be_used_is_told_apart(
    facts: Facts, python: dict[str, object] | None, kind: str, words: str
) -> None:
    assert facts.python is not None
    other = None if python is None else facts.python.model_copy(update=python)
    with pytest.raises(BoardError, match=words) as caught:
        build_bundle(facts.model_copy(update={"python": other}))
    assert caught.value.kind == kind
    assert caught.value.remedy


# --- the native library --------------------------------------------------------------------------


@pytest.fixture
def built(
    cache: Path,
    registry: Registry,
    small_elf: Callable[..., bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, object]:
    """Builds without a compiler; holds what the last one was asked, and the error to end with."""
    library = tmp_path / "libdecode_native.so"
    library.write_bytes(small_elf())
    asked: dict[str, object] = {}

    def native_build(facts: Facts, board: str, *named: object, **options: object) -> NativeBuild:
        asked.update(named=named, **options)
        if isinstance(asked.get("error"), Exception):
            raise asked["error"]  # type: ignore[misc]  # it is one
        sanitize = options["sanitize"]
        assert sanitize is None or isinstance(sanitize, str)
        runtime = (library,) if sanitize else ()
        return NativeBuild(library, "aarch64-linux-gnu.2.36", "zig", "0" * 32, sanitize, runtime)

    monkeypatch.setattr(bundle, "native_build", native_build)
    return asked


def test_the_native_library_is_a_part_of_its_own(built: dict[str, object], facts: Facts) -> None:
    made = build_bundle(facts, "rk-1", native=True)
    part = made.parts[-1]
    assert (part.name, part.kind) == ("native aarch64-linux-gnu.2.36", "native")
    assert names(part.path) == ["native_lib/libdecode_native.so"]
    assert hashlib.sha256(part.path.read_bytes()).hexdigest() == part.sha256
    assert made.native is not None
    assert made.why_not_native is None
    assert build_bundle(facts, "rk-1", native=True) == made
    without = build_bundle(facts, "rk-1")
    assert without.parts == made.parts[:-1]
    assert without.hash != made.hash
    assert without.why_not_native
    assert made.environment("/w")["PYTHONPATH"].endswith(f":/w/parts/{part.sha256}")


def test_a_sanitised_library_brings_its_runtime_and_environment(
    built: dict[str, object], facts: Facts
) -> None:
    made = build_bundle(facts, "rk-1", native=True, sanitize="address")
    assert made.parts[-1].name == "native aarch64-linux-gnu.2.36 address"
    assert names(made.parts[-1].path) == ["native_lib/libdecode_native.so", "native_lib/libx.so"]
    environment = made.environment("/w")
    assert environment["LD_PRELOAD"] == f"/w/parts/{made.parts[-1].sha256}/native_lib/libx.so"
    assert "ASAN_OPTIONS" in environment


def test_without_a_way_to_build_it_the_bundle_says_why_and_goes_without(
    built: dict[str, object], facts: Facts
) -> None:
    built["error"] = BuildError("no zig", remedy="install it")
    made = build_bundle(facts, "rk-1", native=True)
    assert made.native is None
    assert made.why_not_native == "native library: no zig; install it"
    assert [part.kind for part in made.parts] == ["engine", "wheel", "wheel"]


@pytest.mark.parametrize("named", ["toolchain", "sanitize"])
def test_what_the_user_asked_for_must_be_built(
    named: str, built: dict[str, object], facts: Facts
) -> None:
    built["error"] = BuildError("runtime.c: error: no such thing", remedy="repair the sources")
    toolchain = Toolchain(kind="cc", command="old-gcc") if named == "toolchain" else None
    sanitize = "thread" if named == "sanitize" else None
    with pytest.raises(BoardError, match="no such thing; repair the sources") as caught:
        build_bundle(facts, "rk-1", native=True, toolchain=toolchain, sanitize=sanitize)
    assert caught.value.kind == "deploy"
