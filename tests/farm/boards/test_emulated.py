"""Boards of another architecture: what they are from the outside, and what runs on them."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import engine
from engine.native.features import hwcap_features
from harness.boards import virtual
from harness.boards.probe import probe
from harness.boards.virtual import emulation as emulation_module
from harness.boards.virtual import userland as userland_module
from harness.boards.virtual.emulation import Emulation
from harness.boards.virtual.processors import PROCESSORS
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board

Connect = Callable[..., BoardSession]
Make = Callable[..., Board]

AUXILIARY = "import sys; sys.stdout.buffer.write(open('/proc/self/auxv', 'rb').read())"
NESTED = """
import os, platform, subprocess, sys
inner = "import os, platform, sys; print(platform.machine(), sys.executable, os.getpgrp())"
said = subprocess.run([sys.executable, "-S", "-c", inner], capture_output=True, text=True,
                      preexec_fn=lambda: os.setpgid(0, 0), pass_fds=(0,)).stdout.split()
print(platform.machine(), said[0], sys.executable == said[1], os.getpgrp() != int(said[2]))
"""


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


def out(session: BoardSession, command: str) -> str:
    return session.run(command, deadline=soon()).stdout.decode()


@pytest.mark.parametrize("name", sorted(PROCESSORS))
def test_a_core_tells_the_features_that_its_emulator_executes(make_board: Make, name: str) -> None:
    make_board(isa=name)
    shown = Emulation.of((name,), userland_module.userland())
    raw = subprocess.run(
        [*shown.command("python3"), "-S", "-c", AUXILIARY], stdout=subprocess.PIPE, check=True
    ).stdout
    vector = dict(struct.iter_unpack("QQ", raw))
    executed = hwcap_features(vector[16], vector.get(26, 0))
    told = set(PROCESSORS[name].features)
    assert executed == told & hwcap_features(-1, -1)


def test_the_probe_finds_a_board_of_the_other_architecture(connect: Connect) -> None:
    facts = probe(connect(isa="cortex-a76"), deadline=soon())
    assert (facts.machine, facts.bits) == ("aarch64", 64)
    assert {cpu.part for cpu in facts.cpus} == {"cortex-a76"}
    assert len(facts.cpus) == os.cpu_count()
    assert "asimddp" in facts.features
    assert facts.libc.startswith("glibc ")
    assert facts.python is not None
    assert "manylinux2014_aarch64" in facts.python.platform_tags
    assert facts.python.path.endswith("/bin/python3")


def test_mixed_cores_are_told_apart_by_number_capacity_and_features(connect: Connect) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    session = connect(isa=["cortex-a53", "cortex-a76"])
    facts = probe(session, deadline=soon())
    half = (len(facts.cpus) + 1) // 2
    assert [cpu.part for cpu in facts.cpus[:half]] == ["cortex-a53"] * half
    assert facts.big_cores == tuple(range(half, len(facts.cpus)))
    assert "asimddp" in facts.cpus[-1].features
    assert "asimddp" not in facts.features
    shown = out(session, "cat /proc/cpuinfo")
    assert out(session, 'python3 -c \'print(open("/proc/cpuinfo").read(), end="")\'') == shown


def test_the_engine_on_mixed_cores_tries_the_big_ones_first(connect: Connect) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    session = connect(isa=["cortex-a53", "cortex-a76"])
    facts = probe(session, deadline=soon())
    code = (
        "from engine.placement import allowed_here, candidates, collect, parse_cores; "
        "first = candidates(parse_cores(collect()), allowed_here())[0]; "
        "print(first.threads, first.cpus)"
    )
    said = out(session, f"PYTHONPATH={Path(engine.__file__).parents[1]} python3 -S -c '{code}'")
    assert said.strip() == f"1 {facts.big_cores}"


def test_what_an_emulated_python_starts_with_itself_is_emulated(connect: Connect) -> None:
    session = connect(isa="cortex-a53")
    assert out(session, f"python3 -S -c '{NESTED}'").split() == [
        "aarch64",
        "aarch64",
        "True",
        "True",
    ]


def test_a_signal_ends_an_emulated_process_as_any_other(connect: Connect) -> None:
    session = connect(isa="cortex-a53")
    command = "python3 -S -c 'import os; os.kill(os.getpid(), 4)'; echo $?"
    assert int(out(session, command)) == 128 + signal.SIGILL


def test_settings_for_this_machine_s_processor_do_not_reach_the_board(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    said = out(connect(isa="cortex-a53"), "env")
    assert "OPENBLAS_NUM_THREADS=1" in said
    assert "OPENBLAS_CORETYPE" not in said
    assert "OPENBLAS_CORETYPE=Haswell" in out(connect("other"), "env")


def test_an_emulated_board_can_have_the_faults_of_others(connect: Connect) -> None:
    session = connect(isa="cortex-a53", noexec_tmp=True, shell="csh", no_python=True, clock=1970)
    facts = probe(session, deadline=soon())
    assert facts.machine == "aarch64"
    assert facts.python is None
    assert facts.clock_s is not None
    assert facts.clock_s < 366 * 86400


def test_a_machine_without_the_emulator_cannot_be_that_board(
    make_board: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    board = make_board(isa="cortex-a53")
    monkeypatch.setattr(userland_module, "EMULATOR", "no-such-emulator")
    with pytest.raises(BoardError) as caught:
        open_session(board, deadline=soon())
    assert caught.value.kind == "unreachable"
    assert "cannot be that virtual board: no no-such-emulator on PATH" in caught.value.found
    assert "remove 'isa'" in caught.value.remedy
    assert virtual.running() == []


def test_an_emulator_that_hides_mixed_cores_is_noticed(
    make_board: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_board(isa="cortex-a53")
    # Outside a board's namespace a program reads this machine's own file, which is another too.
    root = userland_module.userland()
    mixed = Emulation.of(("cortex-a53", "cortex-a76"), root, count=2)
    with pytest.raises(emulation_module.NotShown, match="a /proc/cpuinfo of its own"):
        mixed.check_shown()
    Emulation.of(("cortex-a53",), root, count=2).check_shown()
