"""A cache of the test's own, facts of a made-up board, wheels and libraries made here."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.boards.facts import Facts, PythonFacts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HARNESS_CACHE", str(folder))
    return folder


@pytest.fixture
def facts() -> Facts:
    python = PythonFacts(
        path="/usr/bin/python3",
        version="3.11.2",
        abi="cp311",
        platform_tags=("manylinux_2_36_aarch64", "manylinux2014_aarch64"),
    )
    return Facts(machine="aarch64", kernel="Linux 6.1", libc="glibc 2.36", python=python)


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    def make(files: dict[str, bytes], name: str = "demo-1.0-py3-none-any.whl") -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in files.items():
                # Without the time of day: the same files are the same bytes, as at a registry.
                archive.writestr(zipfile.ZipInfo(member), data)
        return path

    return make


@pytest.fixture(scope="session")
def small_elf() -> Callable[..., bytes]:
    """A library that needs one version of libc.so.6: the sections that tell it, and no code."""

    def make(machine: int = 183, version: str = "GLIBC_2.34", symbol: str = "sigaction") -> bytes:
        texts = ("libc.so.6", version, symbol, "libx.so")
        names = b"\0" + b"".join(text.encode() + b"\0" for text in texts)
        libc, wanted, function, name = (names.index(text.encode()) for text in texts)
        verneed = struct.pack("<HHIII", 1, 1, libc, 16, 0)
        verneed += struct.pack("<IHHII", 0, 0, 2, wanted, 0)
        sections = [  # (type, content, section of its strings, entries)
            (3, names, 0, 0),
            (11, bytes(24) + struct.pack("<IBBHQQ", function, 0x12, 0, 0, 0, 0), 1, 0),
            (0x6FFFFFFF, struct.pack("<HH", 0, 2), 2, 0),
            (0x6FFFFFFE, verneed, 1, 1),
            (6, struct.pack("<qQqQqQ", 1, libc, 14, name, 0, 0), 1, 0),
        ]
        body, headers = b"", bytes(64)
        for kind, data, link, info in sections:
            place = (64 + len(body), len(data))
            headers += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, *place, link, info, 8, 0)
            body += data
        head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHI", 3, machine, 1)
        head += struct.pack("<QQQI", 0, 0, 64 + len(body), 0)
        head += struct.pack("<HHHHHH", 64, 0, 0, 64, len(sections) + 1, 0)
        return head + body + headers

    return make
