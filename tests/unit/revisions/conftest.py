"""Repositories, and a cache of their exports that is not the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planted.repos import Repo


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


@pytest.fixture
def repos(tmp_path: Path) -> Callable[[str], Repo]:
    """Makes further ones: `repos("other")`."""
    return lambda name: Repo(tmp_path / name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exports of these repositories stay out of the user's cache."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
