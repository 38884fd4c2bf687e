"""A small library of the same form as the engine's, quick to build, and a compiler that keeps a
list of its calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.native.compilers import Compiler, named_compiler, zig_compiler

KERNELS = """
#include "names.h"
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
const char *JOIN(macros_, DN_ISA)(void) {
    return TEXT(DN_ISA) " " NAMES
#ifdef __FMA__
        " fma"
#endif
#ifdef __AVX2__
        " avx2"
#endif
#ifdef __AVX512VNNI__
        " vnni"
#endif
        ;
}
"""
NAMES = '#define NAMES "x"\n'
RUNTIME = """
#include <math.h>
#include <pthread.h>
#include <limits.h>
#include <stdlib.h>
extern const char dn_build_hash[];
const char *build_hash(void) { return dn_build_hash; }
float exponential(float x) { return expf(x); }
int bad_address(void) {
    volatile char *p = malloc(8);
    int found = p[8];
    free((void *)p);
    return found;
}
static int shared;
static void *count(void *p) { for (int i = 0; i < 1000; i++) shared++; return p; }
int bad_thread(void) {
    pthread_t a, b;
    if (pthread_create(&a, 0, count, 0) || pthread_create(&b, 0, count, 0)) return -1;
    pthread_join(a, 0);
    pthread_join(b, 0);
    return shared;
}
int bad_undefined(void) { volatile int x = INT_MAX; x = x + 1; return x; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "src")


def write_sources(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "kernels.c").write_text(KERNELS)
    (folder / "names.h").write_text(NAMES)
    (folder / "runtime.c").write_text(RUNTIME)
    return folder


@pytest.fixture
def another_copy(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: write_sources(tmp_path / name / "elsewhere")


@pytest.fixture(scope="session")
def zig() -> Compiler:
    found = zig_compiler()
    if found is None:
        pytest.skip("needs the ziglang package")
    return found


@pytest.fixture(scope="session")
def gcc() -> Compiler:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    return named_compiler("gcc")


class Calls:
    """A gcc that writes a line for each time it compiles or links."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "calls"
        self.path = folder / "logging-gcc"
        note = f'echo x >>"{self.log}"'
        self.path.write_text(
            f'#!/bin/sh\ncase "$1" in --version) ;; *) {note} ;; esac\nexec gcc "$@"\n'
        )
        self.path.chmod(0o755)
        self.compiler = named_compiler(str(self.path))

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def calls(tmp_path: Path, gcc: Compiler) -> Calls:
    del gcc  # it must be there
    return Calls(tmp_path)
