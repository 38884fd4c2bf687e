from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save, save_file

from engine.formats import FormatError, open_checkpoint
from engine.formats.safetensors import SafetensorsCheckpoint

WEIGHTS: dict[str, npt.NDArray[Any]] = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6, dtype=np.float16).reshape(2, 3) / np.float16(4),
    "scalar": np.array(2.5, np.float32),
}


def with_header(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), ends: Any = (0, 8)) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": list(ends) if isinstance(ends, tuple) else ends,
    }


def refusal(tmp_path: Path, data: bytes) -> str:
    """The message that a file is refused with, having cost next to no memory."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            SafetensorsCheckpoint.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    model = open_checkpoint(path)
    assert model.format == "safetensors"
    assert model.metadata == {"model_type": "llama", "hidden_size": 4}
    assert model.tensors["a.weight"].shape == (3, 4)
    assert model.tensors["b.weight"].type == "F16"
    assert model.tensors["scalar"].shape == (1,)
    for name, values in WEIGHTS.items():
        np.testing.assert_array_equal(model.float32(name), np.atleast_1d(values))
    raw = model.raw("a.weight")
    assert raw.shape == (3, 16)
    model.close()
    np.testing.assert_array_equal(raw.view(np.float32), WEIGHTS["a.weight"])
    with pytest.raises(FormatError, match="after close"):
        model.raw("a.weight")


def test_bf16_becomes_float32_exactly(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 3.140625, 65536.0]], np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header({"w": entry("BF16", (1, 4))}, data))
    np.testing.assert_array_equal(open_checkpoint(path).float32("w"), values)


def test_folder_with_one_file_opens(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(tmp_path).tensors) == set(WEIGHTS)


def sharded(tmp_path: Path) -> dict[str, str]:
    names = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    for name, file in names.items():
        save_file({name: WEIGHTS[name]}, tmp_path / file)
    (tmp_path / "config.json").write_text("{}")
    write_index(tmp_path, names)
    return names


def write_index(tmp_path: Path, names: Any) -> None:
    index = {"metadata": {"total_size": 60}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_model_opens_as_one(tmp_path: Path) -> None:
    sharded(tmp_path)
    model = open_checkpoint(tmp_path)
    for name in ("a.weight", "b.weight"):
        np.testing.assert_array_equal(model.float32(name), WEIGHTS[name])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FormatError, match=r"two.safetensors: the index names this file"):
        open_checkpoint(tmp_path)


def test_shard_cut_by_a_kilobyte_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"big": np.zeros((64, 64), np.float32)}, path)
    data = path.read_bytes()
    assert "1024 bytes are missing" in refusal(tmp_path, data[:-1024])


def test_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    names = sharded(tmp_path)
    write_index(tmp_path, {**names, "b.weight": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(FormatError, match=r"which the index places in 'one\.safetensors'"):
        open_checkpoint(tmp_path)


def test_tensor_that_no_shard_holds_is_refused(tmp_path: Path) -> None:
    names = sharded(tmp_path)
    write_index(tmp_path, {**names, "c": "two.safetensors"})
    with pytest.raises(FormatError, match="tensor 'c' is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "..", "", 3])
def test_index_cannot_name_files_elsewhere(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder)
    save_file({"a.weight": WEIGHTS["a.weight"]}, tmp_path / "outside.safetensors")
    write_index(folder, {"a.weight": file})
    with pytest.raises(FormatError, match="expected the name of a file beside it"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {}}', "\xff"])
def test_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_several_files_without_index_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"found one.safetensors, two.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ({"w": entry(ends=(0, 7))}, bytes(8), "span 7 bytes, F32"),
        ({"w": entry(ends=(8, 0))}, bytes(8), "span -8 bytes"),
        ({"w": entry(ends=(-8, 0))}, bytes(8), "span 8 bytes"),
        ({"w": entry(ends=(4, 12))}, bytes(12), "leaves a hole"),
        ({"a": entry(), "b": entry(ends=(4, 12))}, bytes(12), "overlaps"),
        ({"w": entry()}, bytes(12), "4 bytes follow the last tensor"),
        ({"w": entry(shape=(1 << 61,), ends=(0, 1 << 63))}, bytes(8), "bytes are missing"),
        ({"w": entry(shape=(0,), ends=(0, 0))}, b"", "shape is [0]"),
        ({"w": entry(shape=(True,))}, bytes(8), "shape is [True]"),
        ({"w": entry(shape="2")}, bytes(8), "shape is '2'"),
        ({"w": entry("F31")}, bytes(8), "dtype 'F31' is unknown"),
        ({"w": entry(["F32"])}, bytes(8), "is unknown"),
        ({"w": entry(ends=(0, 8, 16))}, bytes(8), "expected [begin, end]"),
        ({"w": {}}, bytes(8), "shape is None"),
        ({"w": 3}, bytes(8), "its entry is int"),
        (b'{"w": 1, "w": 2}', b"", "'w' is named twice"),
        (b"{", b"", "is not JSON"),
        (b"{" * 5000, b"", "is not JSON"),
        (b'{"\xff": 1}', b"", "is not JSON"),
    ],
)
def test_wrong_header_is_refused(tmp_path: Path, header: Any, data: bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, with_header(header, data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (struct.pack("<Q", 1 << 60) + b"{}", "header length at offset 0"),
        (struct.pack("<Q", 1 << 20) + b"{}", "needs 1048576 bytes"),
        (struct.pack("<Q", 2) + b"[]", "a JSON header expected"),
        (b"<!DOCTYPE html><html>", "looks like HTML"),
        (b"123", "is no safetensors file"),
    ],
)
def test_file_that_is_something_else_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, data)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data, path = save(WEIGHTS), tmp_path / "model.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            SafetensorsCheckpoint.open(path)


def test_tensor_of_a_type_that_is_not_read_is_refused_when_asked_for(tmp_path: Path) -> None:
    save_file({"flags": np.array([True, False])}, tmp_path / "model.safetensors")
    model = open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="tensor 'flags' is BOOL"):
        model.float32("flags")


@pytest.mark.parametrize("text", ["[1]", "{", "nonsense"])
def test_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_tokenizer_files_beside_the_model_are_handed_on(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>", "model_max_length": 9}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert open_checkpoint(tmp_path / "model.safetensors").tokenizer == {
        "kind": "huggingface",
        "tokenizer_json": {"model": {"type": "BPE"}},
        "config": {"eos_token": "<e>"},
        "chat_template": "{{ messages }}",
        "stop_ids": [1, 2],
    }
