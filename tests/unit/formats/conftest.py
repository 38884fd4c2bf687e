"""GGUF files made byte by byte, without any GGUF library, so that each field can be wrong."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

U8, U32, F32, BOOL, STRING, ARRAY = 0, 4, 6, 7, 8, 9  # value type ids


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def string_pair(key: str, value: str) -> bytes:
    return pair(key, STRING, text(value))


def number_pair(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the tensor table and its data. `dims` are in GGUF's order, columns first."""

    name: str
    dims: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None  # None: the next multiple of the alignment

    def line(self, offset: int) -> bytes:
        head = text(self.name) + struct.pack("<I", len(self.dims))
        dims = b"".join(struct.pack("<Q", size) for size in self.dims)
        return head + dims + struct.pack("<IQ", self.type, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    entries: Sequence[Entry] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; valid unless an argument makes it otherwise."""
    tensor_count, kv_count = counts or (len(entries), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensor_count, kv_count) + b"".join(pairs)
    lines, data = b"", b""
    for entry in entries:
        offset = -(-len(data) // alignment) * alignment if entry.offset is None else entry.offset
        lines += entry.line(offset)
        if offset < 1 << 20:
            data = data.ljust(offset, b"\0") + entry.data
    head += lines
    if data:
        head = head.ljust(-(-len(head) // alignment) * alignment, b"\0")
    return head + data


def weights(count: int, start: float = 0.0) -> bytes:
    return struct.pack(f"<{count}f", *(start + index for index in range(count)))


def small_model() -> bytes:
    """A valid file with every kind of value, an F32 and a Q8_0 tensor."""
    pairs = [
        string_pair("general.architecture", "llama"),
        number_pair("llama.block_count", 1),
        pair("flag", BOOL, b"\x01"),
        pair("numbers", ARRAY, struct.pack("<IQ", F32, 3) + struct.pack("<3f", 1, 2, 3)),
        string_pair("tokenizer.ggml.model", "gpt2"),
        pair(
            "tokenizer.ggml.tokens",
            ARRAY,
            struct.pack("<IQ", STRING, 3) + text("a") + text("b") + text("ab"),
        ),
    ]
    blocks = b"".join(struct.pack("<e32b", 0.5, *range(-16, 16)) for _ in range(2))
    return gguf(
        pairs,
        [Entry("norm", (4,), 0, weights(4)), Entry("w", (32, 2), 8, blocks)],
    )


@dataclasses.dataclass(frozen=True)
class Builder:
    """What the tests use of this module; `write` puts bytes into a file of the test's folder."""

    write: Callable[..., Path]
    gguf = staticmethod(gguf)
    pair = staticmethod(pair)
    string_pair = staticmethod(string_pair)
    number_pair = staticmethod(number_pair)
    text = staticmethod(text)
    weights = staticmethod(weights)
    small_model = staticmethod(small_model)
    Entry = Entry
    U8, U32, F32, BOOL, STRING, ARRAY = U8, U32, F32, BOOL, STRING, ARRAY


@pytest.fixture
def make(tmp_path: Path) -> Builder:
    def write(data: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return Builder(write)
