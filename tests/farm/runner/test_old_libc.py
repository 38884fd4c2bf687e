"""Boards whose libc is too old for what is sent: refused by name, before anything is copied."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# What a program asks its libc for its own name and version; musl has no answer to it (confstr(3)).
LIBC = """
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
size_t confstr(int name, char *buffer, size_t size) {
  const char *told = getenv("SHIM_GLIBC");
  if (name != _CS_GNU_LIBC_VERSION || !told) return 0;
  if (buffer && size) {
    strncpy(buffer, told, size - 1);
    buffer[size - 1] = 0;
  }
  return strlen(told) + 1;
}
"""
SHELL = """#!/bin/sh
export PATH={programs}:$PATH LD_PRELOAD={library} {variable}
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
# As musl's ldd says it, on its standard error.
MUSL = "#!/bin/sh\necho 'musl libc (x86_64)\nVersion 1.1.24\nDynamic Program Loader' >&2\nexit 1\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """What makes the programs of a board run on another libc, as far as they can tell."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "libc.c").write_text(LIBC)
    made = tmp_path / "libc.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(made), str(tmp_path / "libc.c")], check=True
    )
    return made


@pytest.mark.parametrize(
    ("variable", "found", "expected"),
    [("SHIM_GLIBC='glibc 2.12'", "glibc 2.12", "glibc 2."), ("", "musl 1.1", "musl 1.2")],
    ids=["old glibc", "musl"],
)
def test_a_board_with_an_old_glibc_or_musl_is_refused_before_anything_is_copied(
    lab: Any,
    servers: Any,
    relay: Callable[..., Any],
    library: Path,
    tmp_path: Path,
    variable: str,
    found: str,
    expected: str,
) -> None:
    programs, work = tmp_path / "programs", tmp_path / "work"
    programs.mkdir()
    if not variable:
        (programs / "ldd").write_text(MUSL)
        (programs / "ldd").chmod(0o755)
        (programs / "getconf").write_text("#!/bin/sh\nexit 1\n")
        (programs / "getconf").chmod(0o755)
    force = SHELL.format(programs=programs, library=library, variable=variable)
    server = servers.sshd(force=force, sftp=None)
    way = relay(server.board)
    boards = lab.boards(
        f"  old: {{host: '127.0.0.1:{way.port}', user: {server.board.user}, "
        f"host_key: '{server.board.host_key}', key_file: '{server.board.key_file}', "
        f"folders: ['{work}']}}"
    )
    item = lab.run(boards, stages=["tiny"]).results["old"]["tiny"]
    assert (item.outcome.value, item.error_kind) == ("error", "deploy")
    said = " ".join(item.explain())
    assert found in said
    assert expected in said
    assert "numpy" in said
    assert item.verdict.remedy
    assert not work.exists()
    # It was only asked: the engine alone is ten times as large.
    assert way.carried < 40_000
