"""Files that are hashed once for many boards."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from harness.deploy import cache


def test_a_file_is_read_once_while_it_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = cache.sha256_file
    monkeypatch.setattr(cache, "sha256_file", lambda path: read.append(path) or real(path))
    path = tmp_path / "model"
    path.write_bytes(b"one")
    digests = [cache.remembered_sha256(path) for _ in range(3)]
    assert digests == [hashlib.sha256(b"one").hexdigest()] * 3
    assert read == [path]


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "model", tmp_path / "other"
    path.write_bytes(b"one")
    cache.remembered_sha256(path)
    path.write_bytes(b"two")  # as long as before
    os.utime(path, ns=(1, 1))
    assert cache.remembered_sha256(path) == hashlib.sha256(b"two").hexdigest()
    other.write_bytes(b"six")
    os.utime(other, ns=(1, 1))
    other.replace(path)  # as long and as old
    assert cache.remembered_sha256(path) == hashlib.sha256(b"six").hexdigest()
