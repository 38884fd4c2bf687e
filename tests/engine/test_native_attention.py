"""Attention and the KV cache by the native kernels: every scheme, layout and edge."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
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
from engine.runtime.cache import KVCache
from engine.runtime.state import CacheOverflow, State
from engine.units.native import create
from engine.units.reference import Reference

KERNELS = [
    isa.name
    for isa in ISAS.get(machine_name(), ())
    if not choose(detect().common, isa.name).missing
]
CACHES = [
    (scheme, layout)
    for scheme in ("f32", "f16", "int8", "int4")
    for layout in ("numpy", "sd", "ds", "mixed")
    if layout != "numpy" or scheme == "f32"
]
CONTEXT = 600  # two chunks of 256 slots and a part of one; no multiple of 32
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 600)
Array = npt.NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")


@dataclasses.dataclass(frozen=True)
class Heads:
    kv_heads: int
    group: int  # query heads that share a key/value head
    head_dim: int

    @property
    def package(self) -> Package:
        """As much of a package as these ops look at."""
        sizes = {"heads": self.kv_heads * self.group, "rms_eps": 1e-5, "rope_scale": 1.0}
        hp = types.SimpleNamespace(kv_heads=self.kv_heads, head_dim=self.head_dim, **sizes)
        return cast(Package, types.SimpleNamespace(tensors={}, hyperparameters=hp))


def cache_of(heads: Heads, scheme: str, layout: str, sequences: int = 1) -> KVCache:
    return KVCache(
        1, CONTEXT, heads.kv_heads, heads.head_dim, scheme=scheme, layout=layout,
        sequences=sequences,
    )  # fmt: skip


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mixing(keep: int = 0, **attributes: Any) -> Op:
    names = ("q", "L00.k", "L00.v", "starts", "visible")
    attributes = {**attributes, **({"keep": keep} if keep else {})}
    return Op(
        "mix", "attention", (*names, *(("prefix",) if keep else ())), ("mix",), (), attributes
    )


APPEND = Op("kv", "kv_append", ("k", "v", "slots"), ("L00.k", "L00.v"))


def attended(
    heads: Heads, cache: KVCache, state: State, op: Op, kernels: str, threads: int
) -> tuple[Array, Array]:
    """(T, H·D) of the kernels, and of the reference in float64 over the same cache."""
    found: State = {**state, **cache.buffers()}
    create(heads.package, context=CONTEXT, kernels=kernels, threads=threads).execute(op, found)
    wide = {
        name: np.nan_to_num(np.asarray(view), nan=7.0).astype(np.float64)
        for name, view in cache.buffers().items()
    }
    exact: State = {**state, **wide, "q": state["q"].astype(np.float64)}
    if "prefix" in state:
        exact["prefix"] = state["prefix"].astype(np.float64)
    Reference(heads.package, CONTEXT, np.float64).execute(op, exact)
    return found["mix"], exact["mix"]


def query(heads: Heads, visible: Sequence[int], starts: Sequence[int], seed: int = 0) -> State:
    width = heads.kv_heads * heads.group * heads.head_dim
    return {
        "q": numbers(seed, len(visible), width),
        "starts": np.array(starts, np.int64),
        "visible": np.array(visible, np.int64),
    }


def poison(cache: KVCache, visible: Sequence[int], starts: Sequence[int]) -> None:
    """What no token may see holds NaN, as far as the scheme has one."""
    seen = np.zeros(cache.sequences * cache.slots, bool)
    for start, count in zip(starts, visible, strict=True):
        seen[start : start + count] = True
    slots = np.flatnonzero(~seen)
    if len(slots):
        for view in cache.buffers().values():
            if cache.scheme in ("f32", "f16"):
                view[slots] = np.full((len(slots), *view.shape[1:]), np.nan)
            elif cache.scheme == "int8":
                view[slots] = np.full((len(slots), *view.shape[1:]), 1e6)
    for part in ("k", "v"):
        scale = cache.pointers(0, part)[1]
        if scale is not None:
            scale.swapaxes(1, 2).reshape(-1, scale.shape[1])[slots] = np.nan


def filled(heads: Heads, scheme: str, layout: str, sequences: int = 1) -> KVCache:
    cache = cache_of(heads, scheme, layout, sequences)
    for seed, view in enumerate(cache.buffers().values()):
        view[:] = numbers(seed + 3, *view.shape)
    return cache


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("scheme", "layout"), CACHES)
@settings(max_examples=12)
@given(
    dim=st.sampled_from([16, 32, 64, 80, 96, 128]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    visible=st.lists(st.sampled_from(EDGES), min_size=1, max_size=20),
    threads=st.sampled_from([1, 2, 3, 5]),
    keep=st.sampled_from([0, 0, 1, 20, 32, 37, 256, 300]),
    data=st.data(),
)
def test_attention_is_that_of_the_reference_at_every_edge(
    scheme: str,
    layout: str,
    kernels: str,
    dim: int,
    kv_heads: int,
    group: int,
    visible: list[int],
    threads: int,
    keep: int,
    data: st.DataObject,
) -> None:
    """Rows of several sequences, few (split over slots) and many (not), a prefix or none."""
    heads = Heads(kv_heads, group, 64 if scheme == "int4" and dim % 32 else dim)
    sequences = data.draw(st.integers(1, 3))
    cache = filled(heads, scheme, layout, sequences)
    regions = st.integers(0, sequences - 1)
    starts = [cache.slots * data.draw(regions) for _ in visible]
    state = query(heads, visible, starts)
    if keep:
        state["prefix"] = numbers(99, *state["q"].shape)
    poison(cache, visible, starts)
    found, exact = attended(heads, cache, state, mixing(keep), kernels, threads)
    assert np.isfinite(found).all()
    assert np.abs(found - exact).max() < 2e-5 * max(np.abs(exact).max(), 1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("scheme", "layout"), CACHES)
def test_threads_neighbours_and_padding_change_no_bit_of_a_row(
    scheme: str, layout: str, kernels: str
) -> None:
    heads = Heads(3, 5, 64)
    cache = filled(heads, scheme, layout, 2)
    visible = [*EDGES, 599, 3, 300]  # more rows than are split over slots
    starts = [cache.slots * (row % 2) for row in range(len(visible))]
    poison(cache, visible, starts)
    state = query(heads, visible, starts)

    def run(rows: slice, threads: int, **attributes: Any) -> Array:
        found: State = {name: values[rows] for name, values in state.items()}
        found |= cache.buffers()
        unit = create(heads.package, context=CONTEXT, kernels=kernels, threads=threads)
        unit.execute(mixing(**attributes), found)
        return found["mix"]

    whole = run(slice(None), 1)
    for threads in (1, 2, 3, 5):
        assert np.array_equal(run(slice(None), threads), whole)
        assert np.array_equal(run(slice(None), threads, buckets=0), whole)
        assert np.array_equal(run(slice(0, 9), threads, buckets=0), whole[:9])
        for row in (0, 5, 13, 20):
            assert np.array_equal(run(slice(row, row + 1), threads), whole[row : row + 1])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("scheme", "layout"), CACHES)
@settings(max_examples=10)
@given(
    dim=st.sampled_from([16, 32, 80, 128]),
    kv_heads=st.integers(1, 4),
    tokens=st.integers(1, 70),
    first=st.integers(0, 80),
    threads=st.sampled_from([1, 2, 3, 5]),
    size=st.sampled_from([1.0, 1e-4, 3e-7, 0.0, 500.0]),
)
def test_what_is_appended_is_what_the_cache_encodes_to_the_bit(
    scheme: str,
    layout: str,
    kernels: str,
    dim: int,
    kv_heads: int,
    tokens: int,
    first: int,
    threads: int,
    size: float,
) -> None:
    """Slots that share bytes and panels are written by several threads at once."""
    heads = Heads(kv_heads, 1, 32 if scheme == "int4" else dim)
    native, wanted = (filled(heads, scheme, layout, 2) for _ in range(2))
    start = wanted.slots if first % 2 else 0
    width = kv_heads * heads.head_dim
    state: State = {
        "k": numbers(1, tokens, width) * np.float32(size),
        "v": numbers(2, tokens, width) * np.float32(size),
        "slots": start + first + np.random.default_rng(tokens).permutation(tokens),
    }
    state["k"][0, 0] = 0
    create(heads.package, context=CONTEXT, kernels=kernels, threads=threads).execute(
        APPEND, {**state, **native.buffers()}
    )
    Reference(heads.package, CONTEXT, np.float32).execute(APPEND, {**state, **wanted.buffers()})
    assert np.array_equal(native.block, wanted.block)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", ["sd", "ds"])
@pytest.mark.parametrize(("scheme", "limit"), [("f16", 65504), ("int8", 65504 * 127),
                                               ("int4", 65504 * 7)])  # fmt: skip
@pytest.mark.parametrize("kernels", KERNELS)
def test_keys_and_values_beyond_the_range_of_the_cache_are_refused_and_counted(
    scheme: str, limit: float, layout: str, kernels: str, threads: int
) -> None:
    heads = Heads(2, 1, 32)
    cache = cache_of(heads, scheme, layout)
    unit = create(heads.package, context=CONTEXT, kernels=kernels, threads=threads)
    state: State = {"k": numbers(1, 9, 64), "v": numbers(2, 9, 64), "slots": np.arange(9)}
    state["k"][3, 40], state["v"][8, 1] = limit, -limit
    unit.execute(APPEND, {**state, **cache.buffers()})  # the very last that fits
    assert np.isfinite(np.asarray(cache.buffers()["L00.k"])).all()
    beyond = np.nextafter(np.float32(limit), np.float32(np.inf))
    state["k"][3, 40], state["v"][8, 1:3] = beyond, (-beyond, np.nan)
    message = rf"op kv: 3 of {2 * 9 * 64} values .*range of a cache in {scheme}"
    with pytest.raises(CacheOverflow, match=message):
        unit.execute(APPEND, {**state, **cache.buffers()})
    assert np.isfinite(np.asarray(cache.buffers()["L00.k"])).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("layout", ["numpy", "sd", "ds", "mixed"])
def test_a_nan_in_a_visible_slot_is_never_lost(layout: str, part: str, kernels: str) -> None:
    """Not in the exponentials either, whose minimum and maximum could swallow it."""
    heads = Heads(2, 5, 32)
    for slot in (0, 17, 40, 299):
        cache = filled(heads, "f32", layout)
        cache.buffers()[f"L00.{part}"][[slot]] = np.full((1, 2, 32), np.nan)
        found: State = {**query(heads, [300, slot, 300], [0, 0, 0]), **cache.buffers()}
        found["visible"][1] = max(slot, 1)
        create(heads.package, context=CONTEXT, kernels=kernels, threads=2).execute(mixing(), found)
        assert np.isnan(found["mix"][[0, 2]]).all()
        assert np.isnan(found["mix"][1]).all() == (slot == 0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("scheme", "layout"), [("f32", "numpy"), ("f16", "mixed")])
def test_scores_far_apart_and_beyond_half_precision_are_right(
    scheme: str, layout: str, kernels: str
) -> None:
    """A token that outweighs all others by e^10000, in either chunk."""
    heads = Heads(1, 4, 64)
    cache = filled(heads, scheme, layout)
    for slot, state in ((3, query(heads, [400], [0])), (399, query(heads, [400], [0]))):
        key = np.asarray(cache.buffers()["L00.k"])[[slot]] * 0 + 300
        cache.buffers()["L00.k"][[slot]] = key
        state["q"] = np.abs(state["q"]) * 50
        found, exact = attended(heads, cache, state, mixing(), kernels, 2)
        assert np.abs(found - exact).max() < 2e-5 * np.abs(exact).max()


def test_heads_that_no_kernel_fits_are_refused_by_name() -> None:
    for dim, scheme, text in ((24, "f16", "a multiple of 16"), (80, "int4", "a multiple of 32")):
        heads = Heads(1, 2, dim)
        cache = cache_of(heads, scheme, "sd")
        state: State = {**query(heads, [3], [0]), **cache.buffers()}
        with pytest.raises(ValueError, match=rf"L00.k: heads of {dim} elements.*{text}.*unit pa"):
            create(heads.package, context=CONTEXT).execute(mixing(), state)


@pytest.mark.parametrize("layout", ["numpy", "sd"])
@pytest.mark.parametrize(
    ("name", "values"),
    [("slots", [5, 1200]), ("slots", [-1, 5]), ("visible", [0, 5]), ("visible", [5, 1201]),
     ("starts", [-600, 0]), ("starts", [0, 1200])],
)  # fmt: skip
def test_slots_that_do_not_exist_are_refused_before_anything_is_touched(
    layout: str, name: str, values: list[int]
) -> None:
    heads = Heads(2, 1, 32)
    cache = filled(heads, "f32", layout, 2)
    before = cache.block.copy()
    state: State = {**query(heads, [5, 5], [0, 0]), "k": numbers(1, 2, 64), "v": numbers(2, 2, 64)}
    state["slots"] = np.array([5, 6])
    state[name] = np.array(values)
    op = APPEND if name == "slots" else mixing()
    with pytest.raises(RuntimeError, match="refused a step: a token, row or slot lies outside"):
        create(heads.package, context=CONTEXT, threads=2).execute(op, {**state, **cache.buffers()})
    assert np.array_equal(cache.block, before, equal_nan=True)
