from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from engine.formats import FormatError, open_checkpoint
from engine.formats.gguf import GgufCheckpoint


def refusal(make: Any, data: bytes) -> str:
    """The message that a file is refused with, having cost next to no memory."""
    path = make.write(data)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            GgufCheckpoint.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize("version", [2, 3])
def test_valid_file_gives_metadata_and_tensors(make: Any, version: int) -> None:
    data = bytearray(make.small_model())
    data[4:8] = struct.pack("<I", version)
    model = open_checkpoint(make.write(bytes(data)))
    assert model.format == "gguf"
    assert model.metadata["general.architecture"] == "llama"
    assert model.metadata["llama.block_count"] == 1
    assert model.metadata["flag"] is True
    assert model.metadata["numbers"] == [1.0, 2.0, 3.0]
    assert model.tokenizer == {"kind": "gpt2", "tokens": ["a", "b", "ab"]}
    assert model.tensors["w"].shape == (2, 32)
    assert model.tensors["w"].type == "Q8_0"
    np.testing.assert_array_equal(model.float32("norm"), [0, 1, 2, 3])
    np.testing.assert_array_equal(model.float32("w"), [np.arange(-16, 16) / 2] * 2)


def test_raw_is_mapped_read_only_and_outlives_close(make: Any) -> None:
    model = open_checkpoint(make.write(make.small_model()))
    raw = model.raw("w")
    assert raw.shape == (2, 34)
    assert not raw.flags.writeable
    assert not raw.flags.owndata
    model.close()
    assert raw[0, 2:].view(np.int8)[0] == -16
    with pytest.raises(FormatError, match="after close"):
        model.raw("w")


def test_unknown_tensor_is_refused_by_name(make: Any) -> None:
    model = open_checkpoint(make.write(make.small_model()))
    with pytest.raises(FormatError, match="no tensor 'nothing'"):
        model.float32("nothing")


def test_more_dimensions_than_four_are_refused(make: Any) -> None:
    entry = make.Entry("deep", (1,) * 9, 0, make.weights(1))
    assert "n_dims of tensor 'deep' at offset" in refusal(make, make.gguf([], [entry]))


def test_no_dimension_at_all_is_refused(make: Any) -> None:
    entry = make.Entry("flat", (), 0, make.weights(1))
    assert "is 0, 1 to 4 expected" in refusal(make, make.gguf([], [entry]))


def test_zero_dimension_is_refused(make: Any) -> None:
    entry = make.Entry("empty", (4, 0), 0, make.weights(4))
    assert "tensor 'empty' at offset 24: has a zero dimension" in refusal(
        make, make.gguf([], [entry])
    )


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 31])
def test_alignment_that_is_no_sensible_power_of_two_is_refused(make: Any, alignment: int) -> None:
    data = make.gguf([make.number_pair("general.alignment", alignment)])
    assert f"general.alignment is {alignment}" in refusal(make, data)


def test_alignment_of_the_file_is_used(make: Any) -> None:
    data = make.gguf(
        [make.number_pair("general.alignment", 256)],
        [make.Entry("a", (3,), 0, make.weights(3)), make.Entry("b", (2,), 0, make.weights(2, 7))],
        alignment=256,
    )
    model = open_checkpoint(make.write(data))
    np.testing.assert_array_equal(model.float32("b"), [7, 8])


def test_string_of_a_gigabyte_in_a_tiny_file_is_refused(make: Any) -> None:
    data = make.gguf([make.pair("k", make.STRING, struct.pack("<Q", 1 << 30) + b"x")])
    message = refusal(make, data.ljust(160, b"\0"))
    assert "k at offset" in message
    assert f"needs {1 << 30} bytes" in message


@pytest.mark.parametrize("counts", [(1 << 40, 0), (0, 1 << 40), (1 << 63, 1 << 63)])
def test_counts_that_cannot_fit_are_refused(make: Any, counts: tuple[int, int]) -> None:
    assert "cannot fit" in refusal(make, make.gguf(counts=counts).ljust(160, b"\0"))


@pytest.mark.parametrize("kind", [0, 4, 6, 7, 8, 12])
def test_array_longer_than_the_file_is_refused(make: Any, kind: int) -> None:
    value = struct.pack("<IQ", kind, 1 << 60)
    assert "big (1152921504606846976 items)" in refusal(
        make, make.gguf([make.pair("big", make.ARRAY, value)])
    )


def test_array_of_arrays_is_refused(make: Any) -> None:
    value = struct.pack("<IQ", make.ARRAY, 1) + struct.pack("<IQ", 0, 0)
    assert "arrays of arrays" in refusal(make, make.gguf([make.pair("nest", make.ARRAY, value)]))


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (13, b"\0" * 8, "value type 13 is unknown"),
        (7, b"\x02", "a bool is 2"),
        (9, struct.pack("<IQ", 99, 0), "item type 99"),
        (9, struct.pack("<IQ", 7, 2) + b"\1\5", "a bool is 5"),
        (8, struct.pack("<Q", 2) + b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_wrong_metadata_value_is_refused(make: Any, kind: int, value: bytes, expected: str) -> None:
    assert expected in refusal(make, make.gguf([make.pair("key", kind, value)]))


def test_key_that_occurs_twice_is_refused(make: Any) -> None:
    twice = [make.number_pair("same", 1), make.number_pair("same", 2)]
    assert "'same' occurs twice" in refusal(make, make.gguf(twice))


def test_empty_key_is_refused(make: Any) -> None:
    assert "is empty" in refusal(make, make.gguf([make.number_pair("", 1)]))


def test_tensor_that_is_listed_twice_is_refused(make: Any) -> None:
    entry = make.Entry("same", (2,), 0, make.weights(2))
    assert "tensor 'same' at offset" in refusal(make, make.gguf([], [entry, entry]))


@pytest.mark.parametrize(("kind", "expected"), [(77, "77, which is unknown"), (4, "Q4_2, removed")])
def test_tensor_type_that_cannot_be_read_is_refused(make: Any, kind: int, expected: str) -> None:
    entry = make.Entry("odd", (32,), kind, bytes(64))
    message = refusal(make, make.gguf([], [entry]))
    assert "type of tensor 'odd'" in message
    assert expected in message


def test_row_that_is_no_whole_number_of_blocks_is_refused(make: Any) -> None:
    entry = make.Entry("cut", (33, 2), 8, bytes(80))
    assert "whole blocks of 32, found 33 columns" in refusal(make, make.gguf([], [entry]))


@pytest.mark.parametrize("dims", [(1 << 62, 1 << 62), (1 << 63,), (1024, 1024, 1024, 1024)])
def test_sizes_beyond_the_file_are_refused(make: Any, dims: tuple[int, ...]) -> None:
    entry = make.Entry("huge", dims, 0, make.weights(1))
    assert "tensor 'huge'" in refusal(make, make.gguf([], [entry]))


def test_offset_beyond_the_file_is_refused(make: Any) -> None:
    entry = make.Entry("far", (1,), 0, make.weights(1), offset=(1 << 64) - 32)
    assert "tensor 'far'" in refusal(make, make.gguf([], [entry]))


def test_tensors_that_overlap_are_refused(make: Any) -> None:
    entries = [
        make.Entry("first", (16,), 0, make.weights(16)),
        make.Entry("second", (4,), 0, make.weights(4), offset=32),
    ]
    assert "'second'" in refusal(make, make.gguf([], entries))


def test_truncated_file_names_the_tensor_and_the_missing_bytes(make: Any) -> None:
    data = make.small_model()
    message = refusal(make, data[:-10])
    assert "tensor 'w' (Q8_0 (2, 32))" in message
    assert f"the file ends at {len(data) - 10}: 10 bytes are missing" in message


def test_every_truncation_is_refused(make: Any) -> None:
    data = make.small_model()
    for length in range(len(data)):
        with pytest.raises(FormatError):
            GgufCheckpoint.open(make.write(data[:length]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"<!DOCTYPE html><html>", "looks like HTML"),
        (b"\n  <html><head>", "looks like HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "looks like a Git LFS pointer"),
        (b"PK\x03\x04aaaaaaaaaaaaaaaaaaaaaaaaaa", "looks like a zip archive"),
        (b"\x1f\x8b\x08aaaaaaaaaaaaaaaaaaaaaaaaa", "looks like gzip"),
        (b'{"error": "not found"}          ', "looks like JSON text"),
        (b"tjgg" + bytes(60), "from before GGUF"),
        (b"FUGG" + bytes(60), "big-endian"),
        (b"garbage garbage garbage", "is not a GGUF file"),
        (b"GG", "is not a GGUF file"),
        (b"", "the file is empty"),
    ],
)
def test_file_that_is_something_else_is_named(make: Any, data: bytes, expected: str) -> None:
    path = make.write(data)
    with pytest.raises(FormatError, match=expected):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("version", "expected"), [(1, "is 1, versions 2 and 3"), (3 << 24, "big endian")]
)
def test_version_that_is_not_read_is_named(make: Any, version: int, expected: str) -> None:
    assert expected in refusal(make, make.gguf(version=version))


def test_misaligned_tensor_is_copied_to_aligned_memory(make: Any) -> None:
    data = make.gguf(
        [],
        [
            make.Entry("a", (1,), 0, make.weights(1)),
            make.Entry("b", (4,), 0, make.weights(4, 5), offset=4),
        ],
    )
    model = GgufCheckpoint.open(make.write(data))
    assert model.misaligned == ("b",)
    raw = model.raw("b")
    assert raw.flags.owndata
    assert raw.ctypes.data % 8 == 0
    np.testing.assert_array_equal(model.float32("b"), [5, 6, 7, 8])


def test_missing_file_and_folder_are_named(make: Any, tmp_path: Any) -> None:
    with pytest.raises(FormatError, match="No such file"):
        open_checkpoint(tmp_path / "nothing.gguf")
    with pytest.raises(FormatError, match=r"neither config\.json with safetensors nor one GGUF"):
        open_checkpoint(tmp_path)


def test_folder_with_one_model_opens_it_and_with_two_names_them(make: Any, tmp_path: Any) -> None:
    make.write(make.small_model(), "one.gguf")
    assert "norm" in open_checkpoint(tmp_path).tensors
    make.write(make.small_model(), "two.gguf")
    with pytest.raises(FormatError, match=r"holds 2 GGUF models \(one.gguf, two.gguf\)"):
        open_checkpoint(tmp_path)


def test_model_without_tokenizer_has_none(make: Any) -> None:
    data = make.gguf([make.string_pair("tokenizer.ggml.model", "none")])
    assert open_checkpoint(make.write(data)).tokenizer is None
