"""Engines of other sources than this checkout's, as bundles take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.native.compilers import BuildError, BuildUnavailable, Compiler
from harness.boards.facts import Facts
from harness.deploy import bundle, other_engine
from harness.deploy.bundle import build_bundle
from harness.deploy.other_engine import build_of
from harness.errors import BoardError

# Another recipe than ours: it counts its runs, and copies a library or complains.
OWN_RECIPE = """
import shutil, sys
from pathlib import Path
here = Path(__file__).parent
count = here.parent.parent / "count"
count.write_text(count.read_text() + "x" if count.exists() else "x")
if (here / "src" / "bad.c").exists():
    sys.exit("bad.c: error: no semicolon")
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
(out / "args").write_text(" ".join(sys.argv[1:]))
shutil.copy(here.parent.parent / "library", out / "libdecode_native.so")
print(out / "libdecode_native.so")
"""


@pytest.fixture
def older(tmp_path: Path, small_elf: Callable[..., bytes], cache: Path) -> Path:
    """An engine's folder with a recipe of its own."""
    root = tmp_path / "export"
    (root / "engine" / "native" / "src").mkdir(parents=True)
    for name in ("__init__.py", "native/__init__.py"):
        (root / "engine" / name).write_text("OLDER = 1\n")
    (root / "engine" / "native" / "build.py").write_text(OWN_RECIPE)
    (root / "library").write_bytes(small_elf())
    return root / "engine"


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Compiler("zig", ("zig", "cc"), "zig 1")
    monkeypatch.setattr(other_engine, "board_compiler", lambda toolchain, target: made)


def runs(engine: Path) -> int:
    count = engine.parent / "count"
    return len(count.read_text()) if count.exists() else 0


def test_its_library_is_built_by_its_own_recipe_and_kept(older: Path, facts: Facts) -> None:
    made = build_of(older, facts, "rk-1")
    assert made.library.name == "libdecode_native.so"
    asked = (made.library.parent / "args").read_text()
    assert f"--target {made.target}" in asked
    assert "--compiler zig" in asked
    assert build_of(older, facts, "rk-1") == made
    assert runs(older) == 1
    (older / "native" / "src" / "new.h").write_text("int x;\n")
    assert build_of(older, facts, "rk-1").hash != made.hash
    assert runs(older) == 2


def test_a_build_that_fails_is_told_in_its_own_words_and_not_tried_again(
    older: Path, facts: Facts
) -> None:
    (older / "native" / "src" / "bad.c").write_text("int x\n")
    for _ in range(2):
        with pytest.raises(BuildError, match="no semicolon"):
            build_of(older, facts, "rk-1")
    assert runs(older) == 1


def test_with_our_own_recipe_its_sources_are_built_as_ours_are(
    older: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def ours(facts: Facts, board: str, toolchain: object, *, sources: Path, **more: object) -> None:
        asked.append(sources)

    monkeypatch.setattr(other_engine, "native_build", ours)
    for name in other_engine.RECIPE:
        (older / "native" / name).write_bytes((other_engine.SOURCES.parent / name).read_bytes())
    build_of(older, facts, "rk-1")
    assert asked == [older / "native" / "src"]
    assert runs(older) == 0


def test_an_engine_without_native_code_is_told(older: Path, facts: Facts) -> None:
    (older / "native" / "build.py").unlink()
    with pytest.raises(BuildError, match="no native code"):
        build_of(older, facts, "rk-1")


@pytest.fixture
def without_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "BOARD_WHEELS", ())


@pytest.mark.usefixtures("without_wheels")
def test_a_bundle_of_another_engine_holds_its_sources_and_its_library(
    older: Path, facts: Facts
) -> None:
    ours, made = build_bundle(facts), build_bundle(facts, "rk-1", native=True, sources=older)
    assert made.engine_hash != ours.engine_hash
    assert [part.kind for part in made.parts] == ["engine", "native"]
    assert b"OLDER" in made.parts[0].path.read_bytes()


@pytest.mark.usefixtures("without_wheels")
def test_another_engine_that_does_not_compile_is_refused_and_does_not_run_in_numpy(
    older: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (older / "native" / "src" / "bad.c").write_text("int x\n")
    with pytest.raises(BoardError, match="no semicolon") as caught:
        build_bundle(facts, "rk-1", native=True, sources=older)
    assert caught.value.kind == "deploy"

    def nothing(*asked: object, **more: object) -> None:
        raise BuildUnavailable("no zig")

    # Where nothing can be compiled, every engine runs in numpy, and they can be compared.
    monkeypatch.setattr(bundle, "build_of", nothing)
    made = build_bundle(facts, "rk-1", native=True, sources=older)
    assert made.native is None
    assert made.why_not_native == "native library: no zig"
