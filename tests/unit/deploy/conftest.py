"""A cache of the test's own, facts of a made-up board, and wheels made here."""

from __future__ import annotations

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
                archive.writestr(member, data)
        return path

    return make
