"""Sanitised builds find what they are for, in a Python process that uses the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.build import build, plan
from engine.native.compilers import BuildError, Compiler, Target
from harness.deploy.native import sanitizer_environment

HERE = Target.local()
CALL = "import ctypes, sys; print(getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])())"
SAYS = {
    "address": "heap-buffer-overflow",
    "thread": "data race",
    "undefined": "signed integer overflow",
}


def call(library: Path, sanitize: str, compiler: Compiler, function: str) -> tuple[int, str]:
    environment = sanitizer_environment(sanitize, library, compiler)
    command = [sys.executable, "-c", CALL, str(library), function]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("sanitize", SAYS)
def test_a_fault_is_found_where_it_is_and_sound_code_passes(
    sanitize: str, sources: Path, gcc: Compiler, tmp_path: Path
) -> None:
    library = build(HERE, gcc, tmp_path / "out", sanitize, sources=sources)
    status, said = call(library, sanitize, gcc, f"bad_{sanitize}")
    assert status != 0
    assert SAYS[sanitize] in said
    assert "runtime.c:" in said
    assert call(library, sanitize, gcc, "macros_generic") == (0, "")


def test_zig_brings_what_undefined_behaviour_needs(
    sources: Path, zig: Compiler, tmp_path: Path
) -> None:
    library = build(HERE, zig, tmp_path / "out", "undefined", sources=sources)
    status, said = call(library, "undefined", zig, "bad_undefined")
    assert status != 0
    assert "signed integer overflow" in said


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_zig_is_refused_for_sanitisers_that_must_be_preloaded(
    sanitize: str, sources: Path, zig: Compiler
) -> None:
    with pytest.raises(BuildError, match=r"expected gcc or clang.*--compiler gcc"):
        plan(HERE, zig, sanitize=sanitize, sources=sources)


def test_an_unknown_sanitiser_is_refused_with_the_names(sources: Path, gcc: Compiler) -> None:
    with pytest.raises(BuildError, match="'memory'; expected one of address, thread, undefined"):
        plan(HERE, gcc, sanitize="memory", sources=sources)
