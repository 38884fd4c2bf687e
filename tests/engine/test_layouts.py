"""Layouts of weights: the same numbers in each, and those of the GGUF file, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.blocks import TYPES
from engine.package import Package
from engine.quantize.ggml import BLOCKS, read_blocks
from engine.quantize.repack import lay_out
from engine.quantize.schemes import LAYOUTS, PackedTensor, dequantize, part_forms
from engine.units.packed import Packed

# type → byte offsets of the fp16 scales in a block
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(kind: str, outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Raw rows of a type: every byte random, the scales finite."""
    block = TYPES[kind]
    random = np.random.default_rng(seed)
    count = inputs // block.elements
    raw = random.integers(0, 256, (outputs, count, block.nbytes), np.uint8)
    for at in HALVES[kind]:
        scales = random.standard_normal((outputs, count)).astype(np.float16)
        raw[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return raw.reshape(outputs, -1)


def packed(kind: str, raw: np.ndarray, layout: str) -> PackedTensor:
    inputs = raw.shape[1] // TYPES[kind].nbytes * TYPES[kind].elements
    made = lay_out(read_blocks(kind, raw, inputs), layout)
    shape = (len(raw), inputs)
    forms = part_forms(made.scheme, made.layout, shape, made.group)
    for part, array in made.parts.items():
        assert array.shape == forms[part].shape and array.dtype in forms[part].dtypes
    return PackedTensor("t", made.scheme, shape, made.parts, made.zero, made.layout, made.group)


@settings(max_examples=120)
@given(
    kind=st.sampled_from(sorted(BLOCKS)),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_every_layout_holds_the_numbers_of_the_gguf_blocks(
    kind: str, outputs: int, blocks: int, seed: int
) -> None:
    raw = random_blocks(kind, outputs, blocks * TYPES[kind].elements, seed)
    wanted = gguf_dequantize(raw, GGMLQuantizationType(TYPES[kind].id))
    for layout in LAYOUTS:
        found = dequantize(packed(kind, raw, layout))
        np.testing.assert_array_equal(found, wanted, err_msg=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", sorted(BLOCKS))
@settings(max_examples=20)
@given(outputs=st.integers(1, 50), data=st.data())
def test_some_rows_are_those_rows_of_the_whole(
    kind: str, layout: str, outputs: int, data: st.DataObject
) -> None:
    tensor = packed(kind, random_blocks(kind, outputs, 256, 1), layout)
    whole = dequantize(tensor)
    index = st.integers(-outputs, outputs - 1)
    rows = np.array(data.draw(st.lists(index, max_size=5)), np.int64)
    np.testing.assert_array_equal(dequantize(tensor, rows), whole[rows])
    bounds = st.one_of(st.none(), st.integers(-60, 60))
    piece = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from((None, 1, 3))))
    np.testing.assert_array_equal(dequantize(tensor, piece), whole[piece])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_the_numpy_unit_multiplies_by_every_kind_of_block(
    kind: str, layout: str, package_in: Callable[[str], Package]
) -> None:
    """Groups of 16 inputs and single-precision scales are among them; two tiles of inputs."""
    tensor = packed(kind, random_blocks(kind, 50, 4096, seed=1), layout)
    unit = Packed(package_in("F32"), 8)
    x = np.random.default_rng(0).standard_normal((3, 4096)).astype(np.float32)
    exact = x.astype(np.float64) @ dequantize(tensor).astype(np.float64).T
    for tokens in (1, 3):
        found = unit._grouped(tensor, x[:tokens])
        assert np.linalg.norm(found - exact[:tokens]) < 1e-5 * np.linalg.norm(exact[:tokens])


def integers(kind: str, raw: np.ndarray) -> np.ndarray:
    """q of every weight (N, K), counted from 0, worked out from the values and row-order scales."""
    tensor = packed(kind, raw, "row")
    outputs, inputs = tensor.shape
    step = np.repeat(tensor.parts["d"].astype(np.float64), tensor.group, axis=1)
    offset = np.zeros_like(step)
    if "m" in tensor.parts:
        offset = np.repeat(tensor.parts["m"].astype(np.float64), tensor.group, axis=1)
    found = (dequantize(tensor).astype(np.float64) - offset) / step
    whole = np.rint(found).astype(np.int64)
    assert whole.shape == (outputs, inputs)
    return whole + {"Q4_0": 8, "Q6_K": 32}.get(kind, 0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_interleaved_bytes_lie_where_the_kernels_read_them(kind: str) -> None:
    """The places of the format's description, one weight at a time."""
    outputs, inputs = 19, 512
    raw = random_blocks(kind, outputs, inputs, seed=3)
    for at in range(4, 16):  # no scale of 0, so that the integers can be worked out
        if kind in ("Q4_K", "Q5_K"):
            raw.reshape(outputs, -1, TYPES[kind].nbytes)[:, :, at] |= 0x11
    if kind == "Q6_K":
        raw.reshape(outputs, -1, 210)[:, :, 192:208] |= 1
    wanted = integers(kind, raw)
    parts = packed(kind, raw, "interleaved").parts
    random = np.random.default_rng(4)
    for n, k in random.integers(0, (outputs, inputs), (300, 2)):
        block, row, group, inside = n // 16, n % 16, k // 32, k % 32
        c, j = inside % 16 // 4, inside % 4
        upper = inside >= 16
        if kind == "Q8_0":
            found = parts["q"][block, group * 512 + inside // 4 * 64 + row * 4 + j]
        else:
            byte = int(parts["q"][block, group * 256 + c * 64 + row * 4 + j])
            found = byte >> 4 if upper else byte & 15
        if kind == "Q5_K":
            high = int(parts["h"][block, group * 64 + row * 4 + j])
            found |= (high >> (2 * c + upper) & 1) << 4
        if kind == "Q6_K":
            high = int(parts["h"][block, group * 128 + c // 2 * 64 + row * 4 + j])
            found |= (high >> ((c % 2) * 4 + 2 * upper) & 3) << 4
        assert found == wanted[n, k], (n, k)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_outputs_past_the_last_weigh_nothing(kind: str) -> None:
    inputs, outputs = 256, 21
    tensor = packed(kind, random_blocks(kind, outputs, inputs, seed=5), "interleaved")
    whole = dataclasses.replace(tensor, shape=(32, inputs))
    assert not dequantize(whole)[outputs:].any()
    for part in ("d", "m", "dm"):
        if part in tensor.parts:
            assert not tensor.parts[part][1, :, outputs - 16 :].any()
    if kind == "Q4_0":  # also for a kernel that takes the zero point off before it scales
        rest = tensor.parts["q"][1, : inputs * 8].reshape(-1, 16, 4)[:, outputs - 16 :]
        assert (rest == 0x88).all()
