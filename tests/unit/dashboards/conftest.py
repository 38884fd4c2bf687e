"""Stores with results in them, and the sites built from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.reading import load
from dashboards.site import write_site
from harness.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store of one test."""
    with Store.open(tmp_path / "store" / "results.sqlite") as opened:
        yield opened


@pytest.fixture(scope="session")
def troubled_store(sample: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two campaigns, six boards, everything that can be shown. Not to be written to."""
    with Store.open(tmp_path_factory.mktemp("troubled") / "results.sqlite") as opened:
        sample.record_all(opened)
        yield opened


@pytest.fixture(scope="session")
def troubled_site(troubled_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site of `troubled_store`."""
    root = tmp_path_factory.mktemp("site") / "out"
    write_site(load(troubled_store), root)
    return root
