"""Files that are made once and shared: hashing, atomic writing, a lock against a second maker."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from harness.deadline import Deadline
from harness.errors import HarnessError

CHUNK_BYTES = 1 << 20
LOCK_S = 3600.0  # packing a large model, or fetching one over a slow link, by whoever holds it
LOCK_POLL_S = 0.1


def sha256_file(path: Path) -> str:
    """The file's SHA-256 in lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """As `sha256_file`, but a file that this process has hashed before is not read again while its
    size, times and inode stay what they were: 200 boards get the same model. Raises OSError."""
    status = path.stat()
    identity = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    with _hashing:  # boards that are deployed to side by side wait for the first to read it
        if identity not in _known:
            _known[identity] = sha256_file(path)
        return _known[identity]


_known: dict[tuple[int, ...], str] = {}
_hashing = threading.Lock()


@contextmanager
def locked(
    path: Path, *, deadline: Deadline | None = None, check: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created, never removed) against threads and processes.

    The kernel drops it when its holder dies, so a killed harness leaves no stale lock. `check` is
    called now and then while another holds it; what it raises ends the wait. Raises HarnessError
    when the lock is not free by the deadline, an hour from now by default.
    """
    deadline = deadline or Deadline.after(LOCK_S, f"{LOCK_S:g} s for a lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Not a blocking flock: nothing could end its wait but the death of this process.
        while not _try_lock(descriptor):
            if check is not None:
                check()
            if deadline.expired:
                raise HarnessError(
                    f"another process has been making this for too long ({deadline.label})",
                    where=str(path),
                    remedy=f"see which one holds it (`fuser {path}`), and end it if it hangs",
                )
            time.sleep(min(LOCK_POLL_S, deadline.remaining))
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name; it appears complete, or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def verified(path: Path, sha256: str) -> bool:
    """Whether `path` holds the content of that hash. Hashed once: while size, times and inode of
    the file stay what they were, a marker beside it answers."""
    try:
        status = path.stat()
    except OSError:
        return False
    marker = path.with_name(f".{path.name}.checked")
    identity = f"{sha256} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    if marker.is_file() and marker.read_text() == identity:
        return True
    if sha256_file(path) != sha256:
        return False
    with atomic_file(marker) as file:
        file.write(identity.encode())
    return True
