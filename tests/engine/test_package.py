"""The package format: lossless where it says so, and checked before it is mapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.formats import open_checkpoint
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import ALIGNMENT, FRONT, MAGIC, Package, PackageError, build_package
from engine.quantize.schemes import dequantize

SCHEMES = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q8_0": "q8",
    "Q4_0": "q4",
    "Q4_1": "q4",
    "Q5_0": "q8",
    "Q5_1": "q8",
}


def halves_order(rows: int, heads: int) -> np.ndarray:
    """Where GGUF keeps row i of a head whose RoPE rotates halves: pairs lie side by side there."""
    size = rows // heads
    inside = [2 * i for i in range(size // 2)] + [2 * i + 1 for i in range(size // 2)]
    return np.array([head * size + i for head in range(heads) for i in inside])


@pytest.mark.parametrize("kind", SCHEMES)
def test_every_weight_of_a_known_type_is_kept_exactly(
    kind: str,
    checkpoint_in: Callable[[str], Checkpoint],
    package_in: Callable[[str], Package],
) -> None:
    checkpoint, package = checkpoint_in(kind), package_in(kind)
    assert package.notes == ()
    down = package.tensors["L01.ffn.down"]
    assert down.scheme == SCHEMES[kind]
    assert np.array_equal(dequantize(down), checkpoint.float32("blk.1.ffn_down.weight"))
    q = checkpoint.float32("blk.0.attn_q.weight")
    assert np.array_equal(dequantize(package.tensors["L00.attn.q"]), q[halves_order(len(q), 4)])
    k = checkpoint.float32("blk.0.attn_k.weight")
    assert np.array_equal(dequantize(package.tensors["L00.attn.k"]), k[halves_order(len(k), 2)])


def test_some_rows_dequantise_to_the_same_numbers_as_all(
    package_in: Callable[[str], Package],
) -> None:
    for kind in SCHEMES:
        tensor = package_in(kind).tensors["embed"]
        rows = np.array([7, 0, 7, 200])
        assert np.array_equal(dequantize(tensor, rows), dequantize(tensor)[rows])


def test_a_type_without_a_layout_is_kept_as_half_floats_and_named(
    tmp_path: Path,
) -> None:
    name = "blk.0.ffn_down.weight"
    write_gguf(SyntheticCheckpoint(ffn=256), tmp_path / "m.gguf", types={name: "TQ2_0"})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    build_package(checkpoint, tmp_path / "m.pkg", name="m")
    package = Package.open(tmp_path / "m.pkg")
    (note,) = package.notes
    assert name in note and "TQ2_0" in note and "relative error" in note
    wanted = checkpoint.float32(name)
    found = dequantize(package.tensors["L00.ffn.down"])
    assert np.abs(found - wanted).max() <= np.abs(wanted).max() * 2**-11


def test_weights_are_views_of_the_mapped_file(synthetic_package: Path) -> None:
    package = Package.open(synthetic_package)
    for tensor in package.tensors.values():
        for part in tensor.parts.values():
            assert not part.flags.owndata and not part.flags.writeable
            assert part.__array_interface__["data"][0] % ALIGNMENT == 0


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    hashes = {
        build_package(SyntheticCheckpoint(seed=9), tmp_path / name, name="m").sha256
        for name in ("a.pkg", "b.pkg")
    }
    assert len(hashes) == 1


def test_the_tokenizer_travels_with_the_package(synthetic_package: Path) -> None:
    assert Package.open(synthetic_package).tokenizer == SyntheticCheckpoint(seed=3).tokenizer


def test_a_cut_package_is_refused_with_both_sizes(tmp_path: Path, synthetic_package: Path) -> None:
    cut = tmp_path / "cut.pkg"
    data = synthetic_package.read_bytes()
    cut.write_bytes(data[:-1000])
    with pytest.raises(PackageError, match=rf"{len(data) - 1000} bytes.*says {len(data)}"):
        Package.open(cut)


def test_a_model_file_is_not_taken_for_a_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(PackageError, match="engine pack"):
        Package.open(path)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(PackageError, match="no/such"):
        Package.open("no/such.pkg")


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A copy of a package whose header was changed."""
    data = source.read_bytes()
    _, offset, length, _ = FRONT.unpack_from(data)
    header = json.loads(data[offset : offset + length])
    change(header)
    text = json.dumps(header).encode()
    front = FRONT.pack(MAGIC, offset, len(text), offset + len(text))
    target.write_bytes(front + data[FRONT.size : offset] + text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", 1 << 60, "lies at"),
        ("offset", 8, "aligned"),
        ("offset", -64, "lies at"),
        ("dtype", "O8", "O8"),
        ("shape", [1 << 40, 1 << 40], "lies at"),
        ("shape", [64, 127], "expected"),
    ],
)
def test_a_tensor_outside_its_file_is_named_and_never_mapped(
    tmp_path: Path, synthetic_package: Path, field: str, value: Any, message: str
) -> None:
    bad = tmp_path / "bad.pkg"

    def change(header: dict[str, Any]) -> None:
        header["tensors"]["L00.ffn.down"]["parts"]["data"][field] = value

    rewrite(synthetic_package, bad, change)
    with pytest.raises(PackageError, match=message):
        Package.open(bad)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=st.integers(0, 255))
def test_a_damaged_header_gives_an_error_or_a_package_never_a_crash(
    tmp_path: Path, synthetic_package: Path, data: st.DataObject, value: int
) -> None:
    damaged = tmp_path / "damaged.pkg"
    content = bytearray(synthetic_package.read_bytes())
    _, offset, length, _ = FRONT.unpack_from(content)
    inside = st.integers(offset, offset + length - 1)
    content[data.draw(st.one_of(st.integers(0, FRONT.size - 1), inside))] = value
    damaged.write_bytes(content)
    try:
        package = Package.open(damaged)
    except PackageError:
        return
    for tensor in package.tensors.values():
        for part in tensor.parts.values():
            part.tobytes()  # every byte of it can be read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is it a package"),
        (b"DECODPK1" + bytes(100), "another version.*engine pack"),
        (MAGIC + bytes(5), "13 bytes, cut"),
        (FRONT.pack(MAGIC, 64, 1 << 40, 100) + bytes(68), "header at 64"),
        (FRONT.pack(MAGIC, 32, 8, 40) + b"[1, 2, 3", "not JSON"),
        (FRONT.pack(MAGIC, 32, 9, 41) + b"[1, 2, 3]", "list, expected an object"),
    ],
)
def test_a_front_that_cannot_be_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.pkg").write_bytes(content)
    with pytest.raises(PackageError, match=message):
        Package.open(tmp_path / "bad.pkg")


@pytest.fixture(scope="session")
def interleaved_package(
    checkpoint_in: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("interleaved") / "q4.pkg"
    build_package(checkpoint_in("Q4_1"), path, name="q4", layout="interleaved")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "row"}, r"part 'q' is uint8 \(4, 1280\), expected uint8 \(64, 5, 16\)"),
        ({"layout": "blocked"}, r"part 'q' .* scheme q4, layout blocked, group 32"),
        ({"layout": "spiral"}, "unknown layout 'spiral', known: row, blocked, interleaved"),
        ({"group": 64}, "groups of 64 inputs, expected a multiple of 32 that divides 160"),
        ({"group": 160}, r"part 'd' is float16 \(4, 5, 16\), expected .* \(4, 1, 16\)"),
        ({"group": 16}, "groups of 16"),
        ({"group": 0}, "groups of 0"),
        ({"scheme": "q9"}, "unknown scheme 'q9'"),
        ({"scheme": "q8"}, r"part 'q' is uint8 .*, expected int8"),
        ({"scheme": "q4k"}, "K a multiple of 256"),
        ({"shape": [65, 160]}, r"\(5, 1280\)"),
        ({"shape": [64, 150]}, "K a multiple of 32"),
        ({"scheme": "f16"}, "layout 'row' only"),
    ],
)
def test_parts_that_do_not_fit_scheme_layout_and_group_are_refused_by_name(
    tmp_path: Path, interleaved_package: Path, change: dict[str, Any], message: str
) -> None:
    def apply(header: dict[str, Any]) -> None:
        header["tensors"]["L00.ffn.down"].update(change)

    rewrite(interleaved_package, tmp_path / "bad.pkg", apply)
    with pytest.raises(PackageError, match=f"'L00.ffn.down'.*{message}"):
        Package.open(tmp_path / "bad.pkg")


def test_streams_of_rows_do_not_lie_a_power_of_two_apart(tmp_path: Path) -> None:
    name = "blk.0.ffn_down.weight"
    write_gguf(SyntheticCheckpoint(ffn=512), tmp_path / "m.gguf", types={name: "Q4_0"})
    build_package(
        open_checkpoint(tmp_path / "m.gguf"), tmp_path / "m.pkg", name="m", layout="interleaved"
    )
    down = Package.open(tmp_path / "m.pkg").tensors["L00.ffn.down"]
    assert down.parts["q"].strides == (4096 + 64, 1)


class Altered(SyntheticCheckpoint):
    """A model with one tensor changed."""

    def float32(self, name: str) -> np.ndarray:
        values = super().float32(name)
        if name == "blk.1.ffn_up.weight":
            values = values.copy()
            values[3, 4] = np.nan
        return values


def test_a_weight_that_is_not_a_number_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up\.weight.*\(3, 4\)"):
        build_package(Altered(seed=1), tmp_path / "nan.pkg", name="nan")
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


def without(checkpoint: SyntheticCheckpoint, **changes: Any) -> SyntheticCheckpoint:
    checkpoint.metadata = {**checkpoint.metadata, **changes}
    return checkpoint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gpt9"}, r"'gpt9' is not known; known: llama"),
        ({"llama.block_count": 5}, r"tensor 'blk\.2\.attn_norm\.weight' is missing"),
        ({"llama.feed_forward_length": 99}, r"ffn_gate.*\(128, 64\).*\(99, 64\)"),
        ({"llama.attention.head_count": "4"}, r"head_count is '4', expected one whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "a finite number"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not known; known: none, linear"),
        ({"llama.attention.head_count_kv": 3}, "4 heads do not divide by 3"),
        ({"llama.context_length": None}, "context_length is missing"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        build_package(without(SyntheticCheckpoint(), **changes), tmp_path / "x.pkg", name="x")


def test_a_config_key_that_nobody_reads_becomes_a_note(tmp_path: Path) -> None:
    checkpoint = without(SyntheticCheckpoint(), **{"llama.new_trick": 1})
    info = build_package(checkpoint, tmp_path / "x.pkg", name="x")
    assert any("llama.new_trick" in note for note in info.notes)
