"""Weights quantised from float: by definition, in every layout, with what cannot be done named."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decode import Decoder
from engine.formats import open_checkpoint
from engine.formats.checkpoint import Checkpoint, FormatError, TensorInfo
from engine.formats.gguf import GgufCheckpoint
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.package import Package, PackageInfo, build_package
from engine.quantize.from_float import FloatScheme
from engine.quantize.plan import quantise
from engine.quantize.schemes import LAYOUTS, PackedTensor, dequantize
from engine.units.packed import Packed

SCHEMES = [
    f"w{bits}-{group}{asymmetric}"
    for bits in (4, 8)
    for group in ("32", "64", "128", "row")
    for asymmetric in ("", "a")
]


class OneTensor:
    """A checkpoint of a single float32 matrix."""

    path = Path("one")

    def __init__(self, values: np.ndarray) -> None:
        self.values = np.ascontiguousarray(values, np.float32)
        self.tensors = {"w": TensorInfo("w", values.shape, "F32", self.values.nbytes)}

    def raw(self, name: str) -> np.ndarray:
        return self.values.view(np.uint8)


def packed(
    values: np.ndarray, scheme: str, layout: str = "row", order: np.ndarray | None = None
) -> tuple[PackedTensor, float]:
    checkpoint: Any = OneTensor(values)
    made = quantise(checkpoint, "w", FloatScheme.parse(scheme), order, layout)
    assert made.error is not None
    tensor = PackedTensor(
        "w", made.scheme, values.shape, made.parts, made.zero, made.layout, made.group
    )
    return tensor, made.error


def weights(outputs: int, inputs: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_t(4, (outputs, inputs)) * 0.05).astype(np.float32)


@settings(max_examples=80)
@given(
    scheme=st.sampled_from(SCHEMES),
    outputs=st.integers(1, 40),
    inputs=st.sampled_from((128, 256, 384)),
    seed=st.integers(0, 2**32),
)
def test_every_layout_holds_the_same_quantised_weights(
    scheme: str, outputs: int, inputs: int, seed: int
) -> None:
    values = weights(outputs, inputs, seed)
    row, error = packed(values, scheme)
    wanted = dequantize(row)
    for layout in LAYOUTS:
        tensor, _ = packed(values, scheme, layout)
        np.testing.assert_array_equal(dequantize(tensor), wanted, err_msg=layout)
    loss = np.linalg.norm(wanted.astype(np.float64) - values) / np.linalg.norm(values)
    assert error == pytest.approx(loss, rel=1e-3)


@settings(max_examples=60)
@given(scheme=st.sampled_from(SCHEMES), outputs=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_each_weight_is_the_step_nearest_to_it(scheme: str, outputs: int, seed: int) -> None:
    """q = clamp(round(w / d)), with the d (and m) that the package holds."""
    values = weights(outputs, 256, seed)
    tensor, _ = packed(values, scheme)
    step = np.repeat(tensor.parts["d"].astype(np.float64), tensor.group, axis=1)
    least, most = (-8, 7) if scheme.startswith("w4") else (-127, 127)
    offset = np.zeros_like(step)
    if "m" in tensor.parts:
        offset = np.repeat(tensor.parts["m"].astype(np.float64), tensor.group, axis=1)
        least, most = (0, 15) if scheme.startswith("w4") else (-128, 127)
    found = dequantize(tensor).astype(np.float64)
    steps = (found - offset) / step
    assert np.abs(steps - np.rint(steps)).max() < 1e-3  # whole steps
    assert steps.min() > least - 0.01 and steps.max() < most + 0.01
    nearest = np.clip((values - offset) / step, least, most)  # the best there is, not rounded
    assert (np.abs(steps - nearest) <= 0.5 + 1e-3).all()


@pytest.mark.parametrize(("group", "share"), [(32, 0.875), (64, 0.86), (128, 0.85)])
def test_four_bits_lose_less_than_with_the_scale_of_the_largest_weight(
    group: int, share: float
) -> None:
    """The eighth step on the wider side alone gives 0.88 of that error; the rest is the range."""
    values = weights(64, 512, seed=group)
    grouped = values.reshape(-1, group)
    step = np.abs(grouped).max(axis=1, keepdims=True) / 7
    plain = np.clip(np.rint(grouped / step), -8, 7) * step
    plain_error = np.linalg.norm(plain - grouped) / np.linalg.norm(grouped)
    _, error = packed(values, f"w4-{group}")
    _, asymmetric = packed(values, f"w4-{group}a")
    assert error < share * plain_error
    assert asymmetric < 0.72 * plain_error


def test_narrower_groups_and_more_bits_lose_less() -> None:
    values = weights(64, 512, seed=1)
    errors = [packed(values, name)[1] for name in ("w4-row", "w4-128", "w4-64", "w4-32", "w8-32")]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 < errors[-2]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zero_and_a_constant_group_is_kept(scheme: str) -> None:
    values = np.zeros((3, 256), np.float32)
    values[1] = 0.5
    found = dequantize(packed(values, scheme)[0])
    assert not found[0].any() and not found[2].any()
    assert np.abs(found[1] - 0.5).max() <= 0.5 * 2**-10  # rounded to float16


@pytest.mark.parametrize("scheme", ["w4-32", "w4-64a", "w8", "w8-32a"])
@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_scales_beyond_half_floats_are_held_as_single(scheme: str, size: float) -> None:
    values = weights(5, 128, seed=2) * np.float32(size)
    tensor, error = packed(values, scheme)
    assert tensor.parts["d"].dtype == np.float32
    assert error == pytest.approx(packed(weights(5, 128, seed=2), scheme)[1], rel=0.05)


def test_rows_are_moved_before_they_are_quantised() -> None:
    values = weights(40, 128, seed=3)
    order = np.random.default_rng(0).permutation(40)
    moved = dequantize(packed(values, "w4", "interleaved", order)[0])
    np.testing.assert_array_equal(moved, dequantize(packed(values, "w4")[0])[order])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named_by_its_place_in_the_file(value: float) -> None:
    values = weights(300, 2048, seed=4)
    values[277, 5] = value
    order = np.arange(300)[::-1]
    with pytest.raises(FormatError, match=r"tensor 'w' holds 1 value that is NaN .*\(277, 5\)"):
        packed(values, "w4", "row", order)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("w4", "w4-32"), ("w8", "w8-row"), ("w4-128a", "w4-128a"), ("w4a", "w4-32a")],
)
def test_schemes_are_read_as_they_are_written(text: str, wanted: str) -> None:
    assert str(FloatScheme.parse(text)) == wanted


@pytest.mark.parametrize("text", ["w5", "w4-48", "4", "w4-", "W4", "w4-32 ", ""])
def test_a_scheme_that_does_not_exist_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"scheme is .* expected w4 or w8.*w4-128"):
        FloatScheme.parse(text)


def build(path: Path, **options: Any) -> tuple[PackageInfo, Package]:
    model = options.pop("model", None) or SyntheticCheckpoint(seed=1, tied=True)
    info = build_package(model, path / "m.pkg", name="m", **options)
    return info, Package.open(info.path)


def test_four_bits_keep_precision_in_the_embedding_and_head_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    _, package = build(tmp_path, scheme="w4")
    kinds = {name: tensor.scheme for name, tensor in package.tensors.items()}
    assert kinds["embed"] == "q8" and package.tensors["embed"].group == 32
    assert kinds["L00.ffn.down"] == kinds["L01.attn.q"] == "q4"
    assert kinds["L00.attn.norm"] == "f32"
    _, package = build(tmp_path, scheme="w4", keep=[])
    assert package.tensors["embed"].scheme == "q4"
    _, package = build(tmp_path, scheme="w4-64", keep=["L*.attn.[qkv]=w8", "L01.*=source"])
    assert package.tensors["L01.attn.q"].scheme == "q8"  # the first rule that matches
    assert package.tensors["L01.attn.q"].group == 64  # a row
    assert package.tensors["L01.attn.out"].scheme == "f32"
    assert package.tensors["L00.attn.out"].scheme == "q4"
    assert package.tensors["embed"].scheme == "q4"


def test_the_error_of_every_quantised_tensor_is_recorded(tmp_path: Path) -> None:
    info, package = build(tmp_path, scheme="w4-64", layout="interleaved")
    assert package.errors == info.errors
    quantised = {name for name, tensor in package.tensors.items() if tensor.scheme[0] == "q"}
    assert set(info.errors) == quantised
    source = SyntheticCheckpoint(seed=1, tied=True).float32("blk.0.ffn_down.weight")
    loss = dequantize(package.tensors["L00.ffn.down"]).astype(np.float64) - source
    assert info.errors["L00.ffn.down"] == pytest.approx(
        np.linalg.norm(loss) / np.linalg.norm(source), rel=1e-3
    )
    assert any(f"{len(quantised)} tensors quantised here" in note for note in info.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w4", "keep": ["L99.*"]}, r"'L99\.\*' matches none of the 20 tensors"),
        ({"scheme": "w4", "keep": ["=w8"]}, "expected PATTERN"),
        ({"scheme": "w4", "keep": ["embed=w9"]}, "scheme is 'w9'"),
        ({"keep": ["embed"]}, "no scheme is given"),
        ({"layout": "diagonal"}, "'diagonal', expected one of row, blocked, interleaved"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def odd_model() -> SyntheticCheckpoint:
    """72 inputs are no multiple of 32; 96 are one, but not of 64 or 128."""
    return SyntheticCheckpoint(seed=2, width=72, heads=4, kv_heads=2, ffn=96, tied=True)


def test_a_shape_that_no_group_divides_falls_back_and_is_noted(tmp_path: Path) -> None:
    info, package = build(tmp_path, model=odd_model(), scheme="w4-128")
    assert package.tensors["L00.ffn.up"].scheme == "f16"  # 72 inputs
    assert package.tensors["L00.ffn.down"].group == 32  # 96 inputs
    text = "\n".join(info.notes)
    assert "72 inputs are no multiple of the 128 that w4-128 needs; kept as f16" in text
    assert "96 inputs are no multiple of the 128 that w4-128 needs; quantised to w4-32" in text
    assert "blk.0.ffn_down.weight, blk.1.ffn_down.weight: 96 inputs" in text


def test_quantising_what_is_quantised_already_is_noted(tmp_path: Path) -> None:
    _, checkpoint = gguf_with(tmp_path, "Q4_1")
    info, _ = build(tmp_path, model=checkpoint, scheme="w4", keep=["embed", "head.logits"])
    assert "blk.0.ffn_down.weight: Q4_1 in the file, quantised again to w4-32" in "\n".join(
        info.notes
    )
    lossless, _ = build(tmp_path, model=checkpoint, scheme="w4-32a")
    assert not any("again" in note for note in lossless.notes)  # the same steps


def test_a_shape_that_no_group_divides_is_refused_when_asked_strictly(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"token_embd.*72 inputs are no multiple of the 32"):
        build(tmp_path, model=odd_model(), scheme="w4-128", strict=True)
    keep = ["embed=source", "L*.attn.*=source", "L*.ffn.gate=source", "L*.ffn.up=source"]
    with pytest.raises(FormatError, match=r"ffn_down.*96 inputs .* 128 that w4-128 needs; choose"):
        build(tmp_path, model=odd_model(), scheme="w4-128", strict=True, keep=keep)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", [None, "w4-32", "w4-64a", "w4-128", "w4-row", "w8", "w8-32a"])
def test_the_numpy_unit_agrees_with_the_reference_in_every_scheme_and_layout(
    scheme: str | None, layout: str, tmp_path: Path
) -> None:
    model = SyntheticCheckpoint(seed=6, width=128, ffn=256, heads=4, kv_heads=2, tied=True)
    _, package = build(tmp_path, model=model, scheme=scheme, layout=layout)
    assert package.layout == layout
    tokens = np.array([5, 90, 17, 230])
    exact = Decoder(package, unit="reference", dtype=np.float64).advance(tokens, all_logits=True)
    batch = Decoder(package, unit="packed").advance(tokens, all_logits=True)
    decoder = Decoder(package, unit="packed")
    steps = np.stack([decoder.advance(tokens[i : i + 1]) for i in range(4)])
    for found in (batch, steps):
        assert np.linalg.norm(found - exact) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_numpy_unit_multiplies_by_groups_of_every_width(scheme: str, tmp_path: Path) -> None:
    """More inputs than fit into one of its tiles."""
    _, package = build(tmp_path)
    tensor, _ = packed(weights(50, 4096, seed=9), scheme, "blocked")
    unit = Packed(package, 8)
    x = np.random.default_rng(0).standard_normal((3, 4096)).astype(np.float32)
    exact = x.astype(np.float64) @ dequantize(tensor).astype(np.float64).T
    for tokens in (1, 3):
        found = unit._grouped(tensor, x[:tokens])
        assert np.linalg.norm(found - exact[:tokens]) < 1e-5 * np.linalg.norm(exact[:tokens])


def test_some_rows_of_a_large_embedding_cost_only_those_rows() -> None:
    tensor, _ = packed(weights(8192, 576, seed=7), "w4-32", "interleaved")
    rows = np.array([8191, 3, 3, 4000])
    tracemalloc.start()
    found = dequantize(tensor, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == (4, 576)
    assert peak < 100_000 < tensor.nbytes // 20


def test_packing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = SyntheticCheckpoint(seed=8, layers=12, width=256, ffn=1024, vocab=256)
    write_gguf(model, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    largest = max(info.nbytes for info in checkpoint.tensors.values())  # 1 MiB
    tracemalloc.start()
    build_package(checkpoint, tmp_path / "m.pkg", name="m", scheme="w4", layout="interleaved")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert peak < 12 * largest < total / 3


def gguf_with(tmp_path: Path, kind: str) -> tuple[Path, Checkpoint]:
    name = "blk.0.ffn_down.weight"
    path = tmp_path / f"{kind}.gguf"
    write_gguf(SyntheticCheckpoint(seed=3), path, types={name: kind})
    return path, open_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "at", "what"), [("Q4_0", 0, "scale"), ("Q4_1", 2, "minimum"), ("Q8_0", 0, "scale")]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_is_not_a_number_is_named_with_row_and_block(
    kind: str, at: int, what: str, layout: str, tmp_path: Path
) -> None:
    path, checkpoint = gguf_with(tmp_path, kind)
    raw = checkpoint.raw("blk.0.ffn_down.weight")  # (64, 4 blocks of 32)
    start = path.read_bytes().index(raw[:2].tobytes())
    size = raw.shape[1] // 4
    with path.open("r+b") as file:
        file.seek(start + raw.shape[1] * 9 + size * 2 + at)
        file.write(struct.pack("<H", 0x7E00))
    with pytest.raises(
        FormatError, match=rf"'blk.0.ffn_down.weight' holds 1 {what} .* row 9, block 2;"
    ):
        build_package(open_checkpoint(path), tmp_path / "m.pkg", name="m", layout=layout)


@pytest.mark.parametrize("scheme", [None, "w4"])
def test_data_that_the_file_misaligns_gives_the_same_package(
    scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, aligned = gguf_with(tmp_path, "Q4_0")
    wanted, _ = build(tmp_path, model=aligned, scheme=scheme)
    model = SyntheticCheckpoint(seed=3)
    model.metadata = {**model.metadata, "general.alignment": 4}
    monkeypatch.setattr("gguf.gguf_writer.GGUF_DEFAULT_ALIGNMENT", 4)
    write_gguf(model, tmp_path / "off.gguf", types={"blk.0.ffn_down.weight": "Q4_0"})
    checkpoint = GgufCheckpoint.open(tmp_path / "off.gguf")
    assert "blk.0.ffn_down.weight" in checkpoint.misaligned
    found, _ = build(tmp_path, model=checkpoint, scheme=scheme)
    assert found.sha256 == wanted.sha256
