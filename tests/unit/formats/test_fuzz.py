"""Broken files give a FormatError or a checkpoint, never anything else, and cost little memory."""

from __future__ import annotations

import contextlib
import tempfile
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gguf.quants  # noqa: F401  # loaded here, so that its memory does not count below
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from engine.formats import FormatError, open_checkpoint
from engine.tokenizer import Tokenizer, TokenizerError

# For a file of a few hundred bytes: the parsed metadata and decoded tensors take a hundredth of it,
# the rest is for tables that the gguf library makes when it meets one of its rarer types.
MEMORY = 4 << 20

SAFETENSORS = save(
    {"a": np.arange(8, dtype=np.float32).reshape(2, 4), "b": np.ones(3, np.float16)},
    metadata={"format": "pt"},
)


def mutations(size: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """(what, where, byte): 0 overwrites, 1 inserts, 2 deletes, 3 cuts the rest off."""
    kinds = st.sampled_from([0, 0, 0, 0, 1, 2, 3])
    interesting = st.one_of(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]), st.integers(0, 255))
    return st.lists(st.tuples(kinds, st.integers(0, size - 1), interesting), min_size=1, max_size=8)


def mutate(data: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    found = bytearray(data)
    for what, where, byte in changes:
        where = min(where, max(len(found) - 1, 0))
        if what == 3:
            del found[where:]
        elif what == 2:
            del found[where : where + 1]
        elif what == 1 or not found:
            found.insert(where, byte)
        else:
            found[where] = byte
    return bytes(found)


def read_everything(path: Path) -> None:
    """Opens a file and reads all there is; passes when it does or raises what it may."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # bytes that are no numbers
            model = open_checkpoint(path)
            for name, info in model.tensors.items():
                raw = model.raw(name)
                assert raw.nbytes == info.nbytes <= path.stat().st_size
                try:
                    assert model.float32(name).shape == info.shape
                except FormatError:
                    continue
            if model.tokenizer is not None:
                with contextlib.suppress(TokenizerError):
                    Tokenizer(model.tokenizer).decode([0])
    except FormatError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_gguf_gives_an_error_or_a_checkpoint(make: Any, folder: Path, data: Any) -> None:
    whole = make.small_model()
    path = folder / "model.gguf"
    path.write_bytes(mutate(whole, data.draw(mutations(len(whole)))))
    read_everything(path)


@settings(max_examples=300)
@given(changes=mutations(len(SAFETENSORS)))
def test_mutated_safetensors_gives_an_error_or_a_checkpoint(
    folder: Path, changes: list[tuple[int, int, int]]
) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(mutate(SAFETENSORS, changes))
    read_everything(path)


@settings(max_examples=200)
@given(tail=st.binary(max_size=200), magic=st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0"]))
def test_any_bytes_give_an_error_or_a_checkpoint(folder: Path, tail: bytes, magic: bytes) -> None:
    path = folder / "anything.gguf"
    path.write_bytes(magic + tail)
    read_everything(path)
