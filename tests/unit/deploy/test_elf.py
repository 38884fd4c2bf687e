"""What a library needs of its system is read from the file itself; a damaged one is refused."""

from __future__ import annotations

import contextlib
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.deploy.elf import Need, newer_than, newest_version, read_elf
from harness.errors import HarnessError

MakeElf = Callable[..., bytes]


def test_machine_libraries_versions_and_their_symbols_are_read(
    small_elf: MakeElf, tmp_path: Path
) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(small_elf())
    found = read_elf(path)
    assert (found.machine, found.name, found.libraries) == ("aarch64", "libx.so", ("libc.so.6",))
    assert found.needs == (Need("libc.so.6", "GLIBC_2.34", ("sigaction",)),)


def test_a_library_of_this_system_is_read() -> None:
    """One that a compiler made: Python's own extension modules."""
    import _ctypes

    found = read_elf(Path(_ctypes.__file__))
    assert found.machine == sysconfig.get_platform().removeprefix("linux-")
    if any(name.startswith("libc.so.6") for name in found.libraries):
        newest = newest_version(found.needs, "GLIBC_")
        assert newest is not None
        assert newest.symbols


def test_needs_newer_than_a_system_are_found_by_number_not_by_text() -> None:
    needs = (
        *(Need("libc.so.6", f"GLIBC_2.{minor}") for minor in (4, 17, 34)),
        Need("libc.so.6", "GLIBC_ABI_DT_RELR"),
        Need("libstdc++.so.6", "GLIBCXX_3.4.30"),
        Need("libc.so.6", "GLIBC_2.2.5"),
    )
    assert newest_version(needs, "GLIBC_") == needs[2]
    assert newer_than(needs, "GLIBC_", "2.4") == (needs[2], needs[1])
    assert newer_than(needs, "GLIBC_", "2.34") == ()
    assert newest_version((), "GLIBC_") is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it begins with b''"),
        (b"#!/bin/sh\n", "it begins with"),
        (b"\x7fELF\x01\x01" + bytes(60), "it begins with"),
    ],
)
def test_a_file_of_another_kind_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(data)
    with pytest.raises(HarnessError, match=f"no ELF library that can be read.*{why}"):
        read_elf(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_cut_library_is_refused(kept: float, small_elf: MakeElf, tmp_path: Path) -> None:
    whole = small_elf()
    path = tmp_path / "x.so"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(HarnessError, match="no ELF library that can be read"):
        read_elf(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be read: No such file"):
        read_elf(tmp_path / "absent.so")


@given(data=st.data())
def test_no_damage_makes_the_reader_fail_in_another_way(
    data: st.DataObject, small_elf: MakeElf, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(small_elf())
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    with contextlib.suppress(HarnessError):
        read_elf(path)
