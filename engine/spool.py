"""The spool: the folder on a board in which one run is told, and who may write what in it.

    spec.json            what the run does (engine.records.RunSpec)
    supervisor.json      who runs it: pid, pgid, start time, boot_id
    events.jsonl         numbered events; one writer, the supervisor; append only
    arrays/NAME.npz      arrays, each announced by an `array` event with its hash
    engine.ATTEMPT.log   stdout and stderr of each engine process, capped
    crash.ATTEMPT.txt    what an engine wrote of itself as a signal ended it (engine.crashing)
    stacks.ATTEMPT.log   where an engine stood that was ended for its silence (engine.watchdog)
    supervisor.log       stderr of the supervisor itself

The engine sends its events to the supervisor over a pipe, one JSON object per line with `t_ns`,
`kind` and `data`; the supervisor numbers them. So a killed engine can harm at most its last line.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.records import Event, RecordError

SPEC_NAME = "spec.json"
SUPERVISOR_NAME = "supervisor.json"
EVENTS_NAME = "events.jsonl"
ARRAYS_NAME = "arrays"
SUPERVISOR_LOG_NAME = "supervisor.log"

# What the engine may say; the other kinds are the supervisor's own.
ENGINE_KINDS = ("ready", "progress", "data", "array", "error", "log")
LINE_LIMIT = 1 << 20  # bytes of one event line; larger findings are arrays
EVENTS_LIMIT = 256 << 20  # bytes of events.jsonl; a run that says more is broken
LOG_LIMIT = 2 << 20  # bytes of one engine.ATTEMPT.log
RESERVE_BYTES = 64 << 10  # given back to a full disk, so that the end of the run can be told

_ARRAY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class SpoolError(RuntimeError):
    """A spool that cannot be used: says found and remedy."""


def engine_log_name(attempt: int) -> str:
    return f"engine.{attempt}.log"


def array_file(name: str) -> str:
    """The path of array set `name` relative to the spool. Raises ValueError for an unsafe name."""
    if not _ARRAY_NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"array name {name!r}: expected letters, digits, '.', '_', '-', 120 at most"
        )
    return f"{ARRAYS_NAME}/{name}.npz"


def save_arrays(spool: Path, name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Write `arrays` (name → ndarray of any shape) as one .npz; returns the `array` event's data.

    The file appears complete or not at all. Raises ValueError for an unsafe name.
    """
    import numpy as np  # here, so that the supervisor's own process does without it

    path = spool / array_file(name)
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    data = buffer.getbuffer()
    write_whole(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return {"name": name, "file": array_file(name), "sha256": digest, "bytes": len(data)}


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write `path` under a temporary name, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class SpoolFull(SpoolError):
    """The disk of the spool is full; raised once, with a reserve given back for the last words."""


class EnginePipe:
    """The engine's end of the event pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send one event. Raises RecordError for a kind that the engine may not use or a line
        over LINE_LIMIT; BrokenPipeError when the supervisor is gone."""
        if kind not in ENGINE_KINDS:
            raise RecordError(f"the engine may not emit {kind!r}, expected one of {ENGINE_KINDS}")
        record = {"t_ns": time.monotonic_ns(), "kind": kind, "data": data}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if len(line) > LINE_LIMIT:
            raise RecordError(
                f"{kind} event of {len(line)} bytes, at most {LINE_LIMIT}; send it as an array"
            )
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]


def parse_engine_line(line: bytes) -> tuple[int | None, str, dict[str, Any]]:
    """(t_ns or None, kind, data) of one line of the event pipe. Raises RecordError."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}; begins {line[:80]!r}") from error
    if not isinstance(raw, dict):
        raise RecordError(f"found {type(raw).__name__}, expected an object")
    kind, data, t_ns = raw.get("kind"), raw.get("data"), raw.get("t_ns")
    if kind not in ENGINE_KINDS:
        raise RecordError(f"kind {kind!r}, the engine may emit {ENGINE_KINDS}")
    if not isinstance(data, dict):
        raise RecordError(f"{kind}: data is {type(data).__name__}, expected an object")
    return (t_ns if type(t_ns) is int else None), kind, data


class LineSplitter:
    """Cuts a byte stream into lines of at most `limit` bytes; longer ones are dropped and counted.

    Holds at most `limit` bytes and one chunk, whatever the stream sends.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self.limit = limit
        self.dropped: list[int] = []  # sizes of dropped lines, for the caller to tell and clear
        self._pending = bytearray()
        self._skipped = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their newline; empty lines left out."""
        lines = []
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            self._add(part)
            if self._skipped:
                self.dropped.append(self._skipped)
            elif self._pending:
                lines.append(bytes(self._pending))
            self._pending.clear()
            self._skipped = 0
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        if self._skipped or len(self._pending) + len(part) > self.limit:
            self._skipped += len(self._pending) + len(part)
            self._pending.clear()
        else:
            self._pending += part

    def remainder(self) -> bytes:
        """What came after the last newline (nothing when it belongs to a line too long)."""
        return bytes(self._pending)


class SpoolWriter:
    """The single writer of events.jsonl.

    Each event is one `write`, in the file before `emit` returns. Raises SpoolError when the folder
    already tells a run. The first time that the disk is full, `emit` gives back a reserve, so that
    the end of the run can still be told, and raises SpoolFull; afterwards OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.next_n = 0
        self.size = 0  # bytes of events.jsonl
        path = folder / EVENTS_NAME
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o644)
        except FileExistsError:
            raise SpoolError(
                f"{path} exists: this spool already tells a run; use a new folder"
            ) from None
        self._reserve = folder / ".reserve"
        self._reserve.write_bytes(b"\0" * RESERVE_BYTES)

    def emit(self, kind: str, data: Mapping[str, Any], t_ns: int | None = None) -> Event:
        """Append one event; `t_ns` is CLOCK_MONOTONIC, now unless given."""
        event = Event(self.next_n, time.monotonic_ns() if t_ns is None else t_ns, kind, data)
        line = event.to_line()
        try:
            self._write(line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._reserve.exists():
                raise
            self._reserve.unlink()
            raise SpoolFull(f"the disk of {self.folder} is full: {error.strerror}") from error
        self.next_n += 1
        self.size += len(line)
        return event

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self.size)  # no half line stays
            raise

    def close(self) -> None:
        """Sync to the disk and close."""
        self._reserve.unlink(missing_ok=True)
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


class CappedLog:
    """A log file of at most `limit` bytes that keeps its beginning and its end.

    What a program says first and last explains a crash; the middle of a flood does not.
    """

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        self.path, self.limit = path, limit
        self.size = 0
        self.cut = 0  # bytes left out so far
        self._note_bytes = 0
        path.write_bytes(b"")

    def write(self, data: bytes) -> None:
        while data:
            room = self.limit - self.size
            if room <= 0:
                self._cut_middle()
                continue
            part, data = data[:room], data[room:]
            with self.path.open("ab") as file:
                file.write(part)
            self.size += len(part)

    def _cut_middle(self) -> None:
        keep = self.limit // 4
        content = self.path.read_bytes()
        head, tail = content[:keep], content[-keep:]
        self.cut += len(content) - self._note_bytes - len(head) - len(tail)
        note = f"\n[… {self.cut} bytes left out …]\n".encode()
        self._note_bytes = len(note)
        write_whole(self.path, head + note + tail)
        self.size = len(head) + len(note) + len(tail)
