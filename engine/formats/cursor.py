"""Reading little-endian fields of a mapped file, each checked against the file's end first."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.formats.checkpoint import FormatError


def map_file(path: Path) -> tuple[npt.NDArray[np.uint8], mmap.mmap]:
    """The whole file as read-only bytes (n,), and the mapping they lie in.

    Raises FormatError for a path that is no regular file, cannot be read, or is empty.
    """
    try:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no such file"
            raise FormatError(f"{path}: {found}, expected a model file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise FormatError(f"{path}: the file is empty; fetch it again")
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: cannot be read: {error}") from error
    return np.frombuffer(mapping, np.uint8), mapping


def looks_like(head: bytes) -> str:
    """What a file that is no model file seems to be, from its first bytes; "" when unknown."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<body")):
        return "looks like HTML: a web page was saved in place of the model; use the download link"
    if text.startswith(b"version https://git-lfs"):
        return "looks like a Git LFS pointer: the model itself was not fetched; run `git lfs pull`"
    if text.startswith(b"pk\x03\x04"):
        return "looks like a zip archive; unpack it first"
    if text.startswith(b"\x1f\x8b"):
        return "looks like gzip data; unpack it first"
    if text.startswith((b"ggjt", b"tjgg", b"lmgg", b"fmgg")):
        return "looks like a ggml file from before GGUF; convert the model again"
    if text.startswith(b"{"):
        return "looks like JSON text: perhaps a server's error message"
    return ""


class Cursor:
    """A position in a file's bytes. Every read names its field, for the error it may raise."""

    def __init__(self, data: mmap.mmap | bytes, path: Path, at: int = 0) -> None:
        self._view = memoryview(data)
        self.path = path
        self.at = at
        self.size = len(self._view)

    def fail(self, field: str, found: str, *, at: int | None = None) -> FormatError:
        """The error for `field` at the current offset, to be raised by the caller."""
        return FormatError(
            f"{self.path}: {field} at offset {self.at if at is None else at}: {found}"
        )

    @property
    def left(self) -> int:
        return self.size - self.at

    def need(self, nbytes: int, field: str) -> None:
        """Raises FormatError unless `nbytes` more bytes are in the file."""
        if nbytes > self.left:
            raise self.fail(
                field,
                f"needs {nbytes} bytes, {self.left} are left of {self.size}; "
                "the file is truncated or not what it says; fetch it again",
            )

    def number(self, code: str, field: str) -> int | float:
        """One number; `code` is its struct letter, little endian."""
        size = struct.calcsize("<" + code)
        self.need(size, field)
        value: int | float = struct.unpack_from("<" + code, self._view, self.at)[0]
        self.at += size
        return value

    def whole(self, code: str, field: str) -> int:
        return int(self.number(code, field))

    def take(self, nbytes: int, field: str) -> bytes:
        self.need(nbytes, field)
        found = bytes(self._view[self.at : self.at + nbytes])
        self.at += nbytes
        return found

    def string(self, field: str, *, limit: int | None = None) -> str:
        """A length (u64) and that many bytes of UTF-8."""
        start = self.at
        length = self.whole("Q", f"length of {field}")
        if limit is not None and length > limit:
            raise self.fail(field, f"is {length} bytes long, at most {limit} expected", at=start)
        raw = self.take(length, field)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(field, f"is not UTF-8: {error}", at=start) from error
