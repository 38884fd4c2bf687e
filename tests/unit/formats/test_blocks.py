from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from engine.formats import FormatError
from engine.formats.blocks import TYPES, dequantise

OWN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
THROUGH_LIBRARY = [
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XXS", "IQ1_S",
    "TQ1_0", "TQ2_0", "MXFP4",
]  # fmt: skip


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def test_sizes_are_those_of_the_gguf_library() -> None:
    for name, block in TYPES.items():
        kind = kind_of(name)
        assert block.id == int(kind)
        if name != "Q8_1":  # the library still counts an older layout with two float32 scales
            assert (block.elements, block.nbytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", OWN + THROUGH_LIBRARY)
def test_any_bytes_decode_as_in_the_gguf_library(name: str) -> None:
    block = TYPES[name]
    generator = np.random.default_rng(1)
    raw = generator.integers(0, 256, (5, 4 * block.nbytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, kind_of(name)).view(np.float32)
        found = dequantise(raw, name, 4 * block.elements)
    assert found.shape == (5, 4 * block.elements)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("Q8_0", 0.02), ("Q5_1", 0.1), ("Q5_0", 0.15), ("Q4_1", 0.2)]
)
def test_values_survive_quantisation_within_half_a_step(name: str, tolerance: float) -> None:
    values = np.random.default_rng(2).normal(0, 1, (8, 64)).astype(np.float32)
    found = dequantise(quantize(values, kind_of(name)).view(np.uint8), name, 64)
    assert np.abs(found - values).max() < tolerance


def test_large_tensor_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(3).integers(0, 256, (7, 34), np.uint8)
    raw[:, 1] &= 0x3F  # finite scales
    whole = dequantise(raw, "Q8_0", 32)
    monkeypatch.setattr("engine.formats.blocks._PIECE", 64)
    np.testing.assert_array_equal(dequantise(raw, "Q8_0", 32), whole)


def test_rows_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(FormatError, match="Q4_0 rows of 64 values take 36 bytes"):
        dequantise(np.zeros((1, 18), np.uint8), "Q4_0", 64)


def test_type_without_decoder_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="Q8_K has no decoder"):
        dequantise(np.zeros((1, 292), np.uint8), "Q8_K", 256)


def test_board_without_the_library_reads_its_own_types_and_names_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert dequantise(np.zeros((1, 20), np.uint8), "Q4_1", 32).shape == (1, 32)
    with pytest.raises(FormatError, match="Q4_K tensors are decoded by the `gguf` library"):
        dequantise(np.zeros((1, 144), np.uint8), "Q4_K", 256)
