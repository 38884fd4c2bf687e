"""Matrix products and embeddings of the native unit: every scheme, layout and instruction set."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native.features import detect
from engine.native.isa import ISAS, choose, machine_name
from engine.native.library import NativeUnavailable, load
from engine.package import Package
from engine.program.ops import Op
from engine.quantize.ggml import Quantised
from engine.quantize.repack import lay_out
from engine.quantize.schemes import LAYOUTS, PackedTensor, dequantize
from engine.runtime.state import State
from engine.units.native import create
from engine.units.reference import Reference

KERNELS = [
    isa.name
    for isa in ISAS.get(machine_name(), ())
    if not choose(detect().common, isa.name).missing
]
Array = npt.NDArray[Any]

# name → scheme, bits, whether there are minima, zero point, the type of scales
QUANTISED: Mapping[str, tuple[str, bool, int, Any]] = {
    "q4": ("q4", False, 8, np.float16),
    "q4 f32": ("q4", False, 8, np.float32),
    "q4 asymmetric": ("q4", True, 0, np.float16),
    "q4 asymmetric f32": ("q4", True, 0, np.float32),
    "q8": ("q8", False, 0, np.float16),
    "q8 f32": ("q8", False, 0, np.float32),
    "q8 asymmetric": ("q8", True, 0, np.float16),
    "q4k": ("q4k", False, 0, np.float16),
    "q5k": ("q5k", False, 0, np.float16),
    "q6k": ("q6k", False, 0, np.float16),
}
FLOATS = ("f32", "f16", "bf16")
SUPER = ("q4k", "q5k", "q6k")


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")


def quantised(name: str, outputs: int, inputs: int, group: int, seed: int) -> Quantised:
    """Random codes over their whole range, random scales and minima; row order."""
    scheme, minima, zero, dtype = QUANTISED[name]
    random = np.random.default_rng(seed)

    def codes(width: int) -> Array:
        return random.integers(0, 256, (outputs, width), np.uint8)

    def floats(count: int, size: float) -> Array:
        return (random.standard_normal((outputs, count)) * size).astype(dtype)

    groups = inputs // 32
    if scheme == "q8":
        parts = {"q": codes(inputs).view(np.int8), "d": floats(inputs // group, 0.01)}
    elif scheme == "q4":
        parts = {"q": codes(inputs // 2), "d": floats(inputs // group, 0.1)}
    else:
        parts = {"q": codes(inputs // 2), "d": floats(inputs // 256, 0.01)}
        if scheme == "q6k":
            group = 16
            parts |= {"h": codes(groups * 8), "s": codes(inputs // 16).view(np.int8)}
        else:
            group = 32
            parts |= {"dm": floats(inputs // 256, 0.01)}
            parts |= {part: codes(groups) & np.uint8(63) for part in ("s", "n")}
        if scheme == "q5k":
            parts["h"] = codes(groups * 4)
    if minima:
        parts["m"] = floats(inputs // group, 0.5)
    return Quantised(scheme, (outputs, inputs), parts, zero, group)


def tensor(made: Quantised, layout: str) -> PackedTensor:
    laid = lay_out(made, layout)
    return PackedTensor("w", laid.scheme, made.shape, laid.parts, laid.zero, layout, laid.group)


def float_tensor(scheme: str, outputs: int, inputs: int, seed: int) -> PackedTensor:
    values = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    data = {
        "f32": values,
        "f16": values.astype(np.float16),
        "bf16": (values.view(np.uint32) >> 16).astype(np.uint16),
    }[scheme]
    return PackedTensor("w", scheme, (outputs, inputs), {"data": data})


def packed(tensors: Mapping[str, PackedTensor]) -> Package:
    """As much of a package as a unit looks at."""
    hp = types.SimpleNamespace(rms_eps=1e-5)
    return cast(Package, types.SimpleNamespace(tensors=tensors, hyperparameters=hp))


def product(
    weight: PackedTensor,
    x: Array,
    *,
    kernels: str,
    threads: int = 1,
    bias: Array | None = None,
    **attributes: str,
) -> tuple[Array, Array, Array]:
    """(T, N): what the kernels give, what the reference gives in float64, and Σ |x| |w|."""
    tensors, names = {"w": weight}, ("w",)
    if bias is not None:
        tensors["b"] = PackedTensor("b", "f32", bias.shape, {"data": bias})
        names = ("w", "b")
    package = packed(tensors)
    op = Op("product", "linear", ("x",), ("y",), names, attributes)
    found: State = {"x": x}
    create(package, context=8, kernels=kernels, threads=threads).execute(op, found)
    exact: State = {"x": x.astype(np.float64)}
    with np.errstate(invalid="ignore"):
        Reference(package, 8, np.float64).execute(op, exact)
        size = np.abs(x).astype(np.float64) @ np.abs(dequantize(weight)).astype(np.float64).T
    return found["y"], exact["y"], size + (0 if bias is None else np.abs(bias))


def activations(tokens: int, inputs: int, seed: int) -> Array:
    """Groups of 32 of very different size; one of nothing."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, inputs)).astype(np.float32)
    x *= np.repeat(np.exp(random.uniform(-6, 6, inputs // 32)), 32)[:inputs].astype(np.float32)
    x[:, :32] = 0
    return x


shapes = st.fixed_dictionaries(
    {
        "outputs": st.integers(1, 83),
        "tokens": st.sampled_from([1, 2, 3, 5, 8, 9, 17]),
        "threads": st.sampled_from([1, 1, 2, 3, 5]),
        "seed": st.integers(0, 1 << 30),
    }
)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=25)
@given(
    shape=shapes,
    blocks=st.integers(1, 5),
    group=st.sampled_from([32, 64, 128, 0]),
    layout=st.sampled_from(LAYOUTS),
    mode=st.sampled_from(["float", "int8"]),
    dequantise=st.sampled_from(["inside", "inside", "before"]),
    biased=st.booleans(),
)
def test_a_product_with_quantised_weights_is_that_of_the_reference(
    name: str,
    kernels: str,
    shape: dict[str, int],
    blocks: int,
    group: int,
    layout: str,
    mode: str,
    dequantise: str,
    biased: bool,
) -> None:
    inputs = blocks * (256 if name in SUPER else max(group, 32))
    made = quantised(name, shape["outputs"], inputs, group or inputs, shape["seed"])
    x = activations(shape["tokens"], inputs, shape["seed"])
    bias = np.linspace(-2, 2, shape["outputs"]).astype(np.float32) if biased else None
    found, exact, size = product(
        tensor(made, layout), x, kernels=kernels, threads=shape["threads"], bias=bias,
        activations=mode, dequantise=dequantise,
    )  # fmt: skip
    assert found.shape == exact.shape
    # Minima and codes of one weight may cancel: what is rounded is larger than their sum.
    slack = 1e-6 * np.abs(x).sum(axis=-1, keepdims=True)
    assert (np.abs(found - exact) <= 1e-5 * size + slack).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scheme", FLOATS)
@settings(max_examples=25)
@given(shape=shapes, inputs=st.integers(1, 70))
def test_a_product_with_float_weights_takes_any_number_of_inputs(
    scheme: str, kernels: str, shape: dict[str, int], inputs: int
) -> None:
    weight = float_tensor(scheme, shape["outputs"], inputs, shape["seed"])
    x = np.random.default_rng(1).standard_normal((shape["tokens"], inputs)).astype(np.float32)
    found, exact, size = product(weight, x, kernels=kernels, threads=shape["threads"])
    assert (np.abs(found - exact) <= 1e-6 * size + 1e-12).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["q4", "q4 asymmetric", "q8", "q4k", "q5k", "q6k"])
def test_sums_of_the_largest_codes_are_exact(name: str, layout: str, kernels: str) -> None:
    """Products in 8 and sums in 16 bits must not saturate, a weight of -128 included. All numbers
    are whole and below 2^24, so every order of summing them gives the same."""
    outputs, inputs = 37, 512
    made = quantised(name, outputs, inputs, 32, 0)
    parts = {part: np.array(array) for part, array in made.parts.items()}
    parts["d"][:] = 1
    for part in ("m", "dm"):
        if part in parts:
            parts[part][:] = 1
    for part in ("s", "n"):
        if part in parts:
            parts[part][:] = 1
    signs = np.random.default_rng(5).choice(np.array([0, 255], np.uint8), parts["q"].shape)
    signs[0], signs[1] = 255, 0
    parts["q"] = signs.view(np.int8) ^ np.int8(127) if name == "q8" else signs  # q8: 127, -128
    if "h" in parts:
        parts["h"][:] = 255
    weight = tensor(dataclasses.replace(made, parts=parts), layout)
    assert name != "q8" or dequantize(weight).min() == -128
    for tokens in (1, 2, 9):
        x = np.full((tokens, inputs), 127, np.float32)
        x[tokens // 2] = -127
        x[-1, ::3] *= -1
        found, exact, _ = product(weight, x, kernels=kernels, activations="int8")
        assert np.array_equal(found, exact)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", QUANTISED)
def test_a_token_does_not_see_which_others_are_computed_with_it(
    name: str, layout: str, kernels: str
) -> None:
    """With int8 activations to the bit; nor does an output see the number of threads."""
    weight = tensor(quantised(name, 150, 512, 64, 3), layout)
    x = activations(21, 512, 3)

    def run(rows: slice, threads: int) -> Array:
        return product(
            weight, x[rows], kernels=kernels, threads=threads, activations="int8"
        )[0]  # fmt: skip

    whole = run(slice(None), 1)
    for threads in (1, 2, 3, 5):
        assert np.array_equal(run(slice(None), threads), whole)
        for start, stop in ((0, 1), (7, 8), (20, 21), (3, 5), (9, 18)):
            assert np.array_equal(run(slice(start, stop), threads), whole[start:stop])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("mode", ["float", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_activations_show_in_every_output_of_their_token(
    bad: float, mode: str, kernels: str
) -> None:
    weight = tensor(quantised("q4", 40, 96, 32, 1), "interleaved")
    for tokens in (1, 3):
        x = np.ones((tokens, 96), np.float32)
        x[-1, 50] = bad
        found, _, _ = product(weight, x, kernels=kernels, activations=mode)
        assert not np.isfinite(found[-1]).any()
        assert np.isfinite(found[:-1]).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", [1e-38, 3e-39, 1e-44, 1e30])
def test_activations_of_any_size_are_quantised_as_defined(size: float, kernels: str) -> None:
    weight = tensor(quantised("q8", 20, 64, 32, 1), "interleaved")
    x = (np.random.default_rng(0).standard_normal((2, 64)) * size).astype(np.float32)
    found, exact, magnitude = product(weight, x, kernels=kernels, activations="int8")
    assert (np.abs(found - exact) <= 1e-5 * magnitude + 1e-43).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*QUANTISED, *FLOATS])
def test_embeddings_are_the_rows_of_the_weight_to_the_bit(
    name: str, layout: str, kernels: str
) -> None:
    if name in FLOATS:
        weight = float_tensor(name, 37, 256, 0)
    else:
        weight = tensor(quantised(name, 37, 256, 64, 0), layout)
    ids = np.array([0, 36, 15, 16, 31, 36, 1])
    op = Op("embed", "embed", ("tokens",), ("x",), ("w",))
    for threads in (1, 3):
        state: State = {"tokens": ids}
        unit = create(packed({"w": weight}), context=8, kernels=kernels, threads=threads)
        unit.execute(op, state)
        assert np.array_equal(state["x"], dequantize(weight, ids))
