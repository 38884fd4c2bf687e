"""A process that dies by a signal writes why, and faulthandler still has its say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.build import build_local, build_record
from engine.native.compilers import BuildError
from harness.triage.record import CrashRecord, code_name, parse_record
from harness.triage.symbols import symbols_of

PRELUDE = """
import ctypes, faulthandler, os, sys, signal, threading
from pathlib import Path
faulthandler.enable()
from engine import crashing
crashing.record_to(Path(sys.argv[1]))
from engine.native.library import load
library = load()
"""


@pytest.fixture
def die(tmp_path: Path) -> object:
    """`die(code)`: (record, status, stderr) of a process that runs it."""
    try:
        library = build_local()
    except BuildError as error:
        pytest.skip(f"needs a C compiler: {error}")

    def run(code: str) -> tuple[CrashRecord | None, int, str]:
        path = tmp_path / "crash.0.txt"
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "ENGINE_NATIVE_LIB": str(library)},
        )
        return parse_record(path.read_text()), done.returncode, done.stderr

    return run


def test_a_bad_access_is_recorded_and_passed_on(die) -> None:  # type: ignore[no-untyped-def]  # a local function
    record, status, said = die("ctypes.memset(0x123456, 1, 64)")
    assert status == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in said
    assert record is not None and record.whole
    assert (record.signal, code_name(11, record.code)) == (11, "SEGV_MAPERR")
    assert record.address == 0x123456
    assert record.build == build_record(build_local())["hash"]
    region = record.region(record.pc or 0)
    assert region is not None and region.executable
    assert len(record.at) == 64 and len(record.stack) > 1000
    own = record.region(record.anchor or 0)
    assert own is not None and own.module == "libdecode_native.so"


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE])
def test_a_signal_that_was_sent_tells_who_sent_it(die, number: int) -> None:  # type: ignore[no-untyped-def]  # as above
    record, status, _ = die(f"os.kill(os.getpid(), {int(number)})")
    assert status == -number
    assert record is not None
    assert (record.signal, record.sender, record.address) == (number, record.process, None)


def test_two_threads_that_die_at_once_leave_one_record(die) -> None:  # type: ignore[no-untyped-def]  # as above
    record, status, _ = die(
        "def hit(b):\n    b.wait(); ctypes.memset(0x123456, 1, 64)\n"
        "b = threading.Barrier(4)\n"
        "for _ in range(3): threading.Thread(target=hit, args=(b,)).start()\n"
        "hit(b)"
    )
    assert status == -signal.SIGSEGV
    assert record is not None and record.whole and record.address == 0x123456


def test_a_child_that_was_forked_writes_nothing(die) -> None:  # type: ignore[no-untyped-def]  # as above
    record, status, _ = die(
        "pid = os.fork()\n"
        "if pid == 0: ctypes.memset(0x123456, 1, 64)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -11)"
    )
    assert (record, status) == (None, 0)


def test_a_jump_to_nowhere_is_recorded_without_code(die) -> None:  # type: ignore[no-untyped-def]  # as above
    record, status, _ = die("ctypes.CFUNCTYPE(None)(0x123450)()")
    assert status == -signal.SIGSEGV
    assert record is not None and record.whole
    assert (record.pc, record.at, record.region(0x123450)) == (0x123450, b"", None)


def test_a_library_names_functions_lines_and_what_is_inlined() -> None:
    try:
        symbols = symbols_of(build_local())
    except BuildError as error:
        pytest.skip(f"needs a C compiler: {error}")
    start = symbols.address("dn_run")
    assert start is not None
    frame = symbols.frame(start)
    assert (frame.function, frame.within, frame.build) == ("dn_run", 0, symbols.build)
    assert frame.source.startswith("team.c:")
    work = symbols.address("dn_work") or 0
    size = next(size for at, size, name in symbols.functions if name == "dn_work")
    inlined = {name for at in range(work, work + size, size // 24) for name in symbols.inlined(at)}
    assert "run_linear" in inlined  # the only one who calls it
    assert symbols.function(1) == ("", 0) and symbols.line(1) == ""
