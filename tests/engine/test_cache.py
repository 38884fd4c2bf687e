"""The KV cache: what each scheme keeps, where each layout puts it, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decode import Decoder
from engine.package import Package
from engine.program.ops import Op
from engine.runtime.cache import (
    F16_MAX,
    CacheShape,
    CacheView,
    KVCache,
    append,
    estimate_bytes,
    range_limit,
)
from engine.runtime.state import CacheOverflow
from engine.runtime.sync import NonFinite, SyncExecutor
from engine.runtime.trace import Taps

SCHEMES = ("f32", "f16", "int8", "int4")
OP = Op("L03.attn.kv", "kv_append", ("k", "v", "slots"), ("L03.k", "L03.v"))


@st.composite
def appends(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a cache, and values for some of its slots."""
    sizes = {
        "context": draw(st.integers(1, 70)),
        "kv_heads": draw(st.integers(1, 3)),
        "head_dim": 2 * draw(st.integers(1, 9)),
        "sequences": draw(st.integers(1, 3)),
    }
    slots = CacheShape(1, layout="ds", **{k: v for k, v in sizes.items()}).slots
    total = sizes["sequences"] * min(slots, sizes["context"])
    chosen = draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=20, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Heads from nothing over denormal float16 scales to the largest that float16 takes.
    shape = (len(chosen), sizes["kv_heads"], 1)
    magnitude = 10.0 ** rng.integers(-12, 5, shape) * rng.integers(0, 2, shape)
    values = rng.uniform(-1, 1, (*shape[:2], sizes["head_dim"])) * magnitude
    return {"sizes": sizes, "chosen": chosen, "values": values.astype(np.float32)}


def placed(cache: KVCache, sizes: dict[str, int], chosen: list[int]) -> np.ndarray:
    """`chosen`, counted over contexts, as slots counted over this layout's regions."""
    sequence, slot = np.divmod(np.array(chosen), min(cache.slots, sizes["context"]))
    return sequence * cache.slots + slot


@pytest.mark.parametrize("scheme", SCHEMES)
@given(made=appends())
@settings(max_examples=60)
def test_both_layouts_hold_the_same_to_the_bit_and_within_the_schemes_error(
    scheme: str, made: dict[str, Any]
) -> None:
    sizes, values = made["sizes"], made["values"]
    read = {}
    for layout in ("sd", "ds"):
        cache = KVCache(1, scheme=scheme, layout=layout, **sizes)
        view = cache.buffers()["L00.k"]
        slots = placed(cache, sizes, made["chosen"])
        view[slots] = values
        read[layout] = view[slots]
        # By range, whole, by number and by index array: the same floats.
        assert np.array_equal(np.asarray(view)[slots], read[layout])
        assert np.array_equal(view[int(slots[0])], read[layout][0])
        assert np.array_equal(view[slots[:, None]][:, 0], read[layout])
        low, high = int(slots.min()), int(slots.max()) + 1
        assert np.array_equal(view[low:high], np.asarray(view)[low:high])
        # What a cache reads as is kept exactly when it is written again, down to denormal scales.
        view[slots] = read[layout]
        normal = np.abs(values).max(axis=-1) >= 127 * 2.0**-14
        assert np.array_equal(view[slots][normal], read[layout][normal])
        others = np.setdiff1d(np.arange(len(view)), slots)
        assert not view[others].any() and not cache.buffers()["L00.v"][:].any()
    assert np.array_equal(read["sd"], read["ds"])
    assert (np.abs(read["sd"] - values) <= error_bound(scheme, values)).all()


def error_bound(scheme: str, values: np.ndarray) -> np.ndarray:
    """Half a step; and the clipping that a rounded scale brings, up to half a denormal of it for
    each level."""
    if scheme == "f32":
        return np.zeros_like(values)
    if scheme == "f16":
        return np.maximum(np.abs(values) * 2.0**-11, 2.0**-25)
    levels = {"int8": 127, "int4": 7}[scheme]
    scale = np.abs(values).max(axis=-1, keepdims=True).astype(np.float64) / levels
    rounding = np.maximum(scale * 2.0**-11, 2.0**-25)
    return np.broadcast_to(0.5001 * (scale + rounding) + levels * rounding, values.shape)


@pytest.mark.parametrize("layout", ["sd", "ds"])
@pytest.mark.parametrize("scheme", SCHEMES)
@given(made=appends(), again=st.integers(0, 2**32))
@settings(max_examples=30)
def test_an_append_changes_its_slots_and_no_other_byte(
    scheme: str, layout: str, made: dict[str, Any], again: int
) -> None:
    """Also where two slots share a byte."""
    sizes = made["sizes"]
    cache = KVCache(1, scheme=scheme, layout=layout, **sizes)
    view = cache.buffers()["L00.v"]
    rng = np.random.default_rng(again)
    view[:] = rng.standard_normal(view.shape)
    before = view.copy()
    keys = cache.pointers(0, "k")[0].tobytes()
    slots = placed(cache, sizes, made["chosen"])
    view[slots] = made["values"]
    others = np.setdiff1d(np.arange(len(view)), slots)
    assert np.array_equal(view[others], before[others])
    view[slots] = before[slots]
    assert np.array_equal(view.copy(), before)
    assert cache.pointers(0, "k")[0].tobytes() == keys


def test_the_memory_of_each_scheme_and_layout_is_as_described() -> None:
    """Element by element, in plain loops."""
    rng = np.random.default_rng(5)
    b, k, s, d = 2, 3, 64, 8
    values = rng.standard_normal((b * s, k, d)).astype(np.float32)
    for scheme in SCHEMES:
        for layout in ("sd", "ds"):
            cache = KVCache(2, s, k, d, scheme=scheme, layout=layout, sequences=b)
            cache.buffers()["L01.v"][:] = values
            data, scale = cache.pointers(1, "v")
            assert data.flags.c_contiguous and data.ctypes.data % 64 == 0
            for where in np.ndindex(b, k, s, d):
                sequence, head, slot, element = where
                panel, lane = divmod(slot, 32)
                if scheme == "int4" and layout == "sd":
                    byte = int(data[sequence, head, slot, element % (d // 2)])
                    code: float = (byte >> 4 if element >= d // 2 else byte & 15) - 8
                elif scheme == "int4":
                    byte = int(data[sequence, head, panel, element, lane % 16])
                    code = (byte >> 4 if lane >= 16 else byte & 15) - 8
                elif layout == "sd":
                    code = float(data[sequence, head, slot, element])
                else:
                    code = float(data[sequence, head, panel, element, lane])
                vector = values[sequence * s + slot, head]
                if scale is None:
                    assert code == data.dtype.type(vector[element])
                    continue
                levels = {"int8": 127, "int4": 7}[scheme]
                step = np.float16(np.abs(vector).max() / np.float32(levels))
                assert scale[sequence, head, slot] == step
                wanted = np.rint(vector[element] / np.float32(step))
                assert code == np.clip(wanted, -levels, levels)


@pytest.mark.parametrize("layout", ["sd", "ds"])
@pytest.mark.parametrize("scheme", ["f16", "int8", "int4"])
def test_the_largest_value_is_kept_and_a_larger_one_is_refused_before_anything_is_written(
    scheme: str, layout: str
) -> None:
    cache = KVCache(1, 8, 1, 4, scheme=scheme, layout=layout)
    view, limit = cache.buffers()["L00.k"], range_limit(scheme)
    assert limit == {"f16": 65504.0, "int8": 65504.0 * 127, "int4": 65504.0 * 7}[scheme]
    top = np.full((1, 1, 4), limit, np.float32)
    append(OP, view, np.array([1]), top)
    assert view[1].max() == limit
    for bad in (np.nextafter(np.float32(limit), np.float32(np.inf)), np.inf, -np.inf, np.nan):
        values = np.ones((2, 1, 4), np.float32)
        values[1, 0, 2] = bad
        with pytest.raises(CacheOverflow, match=rf"op L03\.attn\.kv: 1 of 8 .* cache in {scheme}"):
            append(OP, view, np.array([1, 2]), values)
        assert view[1].max() == limit and not view[2].any()


def test_nothing_and_next_to_nothing_are_kept_as_nothing() -> None:
    for scheme in ("int8", "int4"):
        view = KVCache(1, 4, 1, 4, scheme=scheme).buffers()["L00.k"]
        view[:] = np.full((4, 1, 4), 1e-9, np.float32)
        assert not view[:].any()
    half = KVCache(1, 4, 1, 4, scheme="f16").buffers()["L00.k"]
    half[0] = np.float32(2.0**-24)  # the smallest denormal
    assert (half[0] == 2.0**-24).all()


def swap_cache(decoder: Decoder, scheme: str, layout: str) -> None:
    hp = decoder.hyperparameters
    decoder.cache = KVCache(
        hp.layers, decoder.context, hp.kv_heads, hp.head_dim,
        scheme=scheme, layout=layout, dtype=decoder.unit.dtype,
    )  # fmt: skip
    decoder._caches = decoder.cache.buffers()


@pytest.mark.parametrize("unit", ["reference", "packed"])
@pytest.mark.parametrize(
    ("scheme", "tolerance"), [("f32", 1e-6), ("f16", 2e-3), ("int8", 2e-2), ("int4", 0.3)]
)
def test_decode_over_any_cache_stays_close_to_floats(
    synthetic_package: Path, scheme: str, tolerance: float, unit: str
) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 100)
    package = Package.open(synthetic_package)
    wanted = Decoder(package, unit=unit).advance(tokens, all_logits=True)
    found = {}
    for layout in ("sd", "ds"):
        decoder = Decoder(package, unit=unit)
        swap_cache(decoder, scheme, layout)
        found[layout] = decoder.advance(tokens, all_logits=True)
        assert np.linalg.norm(found[layout] - wanted) <= tolerance * np.linalg.norm(wanted)
    assert np.array_equal(found["sd"], found["ds"])


def test_a_model_that_overflows_float16_keys_is_stopped_with_step_and_op(
    package_in: Callable[[str], Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "scale:1e5@L01.attn.k")
    monkeypatch.setenv("ENGINE_FAULT_AFTER", "1")
    decoder = Decoder(package_in("F32"))
    swap_cache(decoder, "f16", "sd")
    decoder.advance(np.array([3]))
    with pytest.raises(CacheOverflow) as got:
        decoder.advance(np.array([4]))
    assert isinstance(got.value, NonFinite)
    assert (got.value.step, got.value.op, got.value.layer) == (1, "L01.attn.kv", 1)
    assert "beyond ±65504, the range of a cache in f16" in str(got.value)


def test_taps_of_a_quantised_cache_are_what_it_reads_as(synthetic_package: Path) -> None:
    decoder, taps = Decoder(Package.open(synthetic_package)), Taps()
    swap_cache(decoder, "int8", "ds")
    decoder.advance(np.array([1, 2, 3]), taps=taps)
    assert np.array_equal(taps.stacked("L01.k"), decoder.cache.buffers()["L01.k"][:3])


@pytest.mark.parametrize("layout", ["numpy", "sd", "ds"])
def test_a_plain_cache_of_the_reference_is_exact_in_float64(layout: str) -> None:
    view = KVCache(1, 5, 2, 4, layout=layout, dtype=np.float64).buffers()["L00.k"]
    values = np.random.default_rng(1).standard_normal((5, 2, 4))
    view[:5] = values
    assert np.array_equal(view[:5], values)
    assert isinstance(view, np.ndarray) == (layout == "numpy")


def test_sizes_are_known_before_a_cache_is_made(synthetic_package: Path) -> None:
    hp = Package.open(synthetic_package).hyperparameters  # 2 layers, K = 2, D = 16
    assert estimate_bytes(hp, 100) == 2 * 2 * 2 * 16 * 4 * 100
    assert estimate_bytes(hp, 100, "f16", "ds") == 2 * 2 * 2 * 16 * 2 * 128
    assert estimate_bytes(hp, 100, "int8", "sd", 3) == 2 * 2 * 2 * (16 + 2) * 100 * 3
    assert estimate_bytes(hp, 100, "int4") == 2 * 2 * 2 * (8 + 2) * 100
    for scheme in SCHEMES:
        for layout in ("sd", "ds"):
            for sequences in (1, 3):
                arguments = (2, 100, 2, 16)
                cache = KVCache(*arguments, scheme=scheme, layout=layout, sequences=sequences)
                wanted = estimate_bytes(hp, 100, scheme, layout, sequences)
                held = [
                    part
                    for layer in range(2)
                    for name in "kv"
                    for part in cache.pointers(layer, name)
                    if part is not None
                ]
                assert cache.nbytes == wanted == sum(part.nbytes for part in held)
                assert cache.bytes_per_position * cache.slots * sequences == wanted
                assert wanted <= cache.block.nbytes < wanted + 64 * len(held)


def test_views_of_all_parts_share_no_byte() -> None:
    cache = KVCache(2, 33, 2, 4, scheme="int4", layout="ds", sequences=2)
    views = cache.buffers()
    for number, view in enumerate(views.values(), 1):
        view[:] = np.full(view.shape, number, np.float32)
    for number, view in enumerate(views.values(), 1):
        assert isinstance(view, CacheView) and np.allclose(view[:], number, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "fp8"}, "cache scheme is 'fp8', expected one of f32, f16, int8, int4"),
        ({"layout": "dk"}, "cache layout is 'dk', expected one of numpy, sd, ds, mixed"),
        ({"layout": "numpy", "scheme": "int8"}, "choose layout 'sd', 'ds' or 'mixed'"),
        ({"sequences": 0}, "cache sequences is 0, expected at least 1"),
        ({"head_dim": 3, "scheme": "int4"}, "cache head_dim is 3, expected an even number"),
    ],
)
def test_impossible_caches_are_refused(arguments: dict[str, Any], message: str) -> None:
    sizes = {"layers": 1, "context": 4, "kv_heads": 1, "head_dim": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        KVCache(**sizes)


def test_alone_an_op_says_overflow_too(synthetic_package: Path) -> None:
    """As accuracy alignment runs it: no step, but the op's name."""
    decoder = Decoder(Package.open(synthetic_package))
    hp = decoder.hyperparameters
    cache = KVCache(hp.layers, 4, hp.kv_heads, hp.head_dim, scheme="f16")
    op = decoder.program.op("L01.attn.kv")
    big = np.full((1, hp.kv_heads * hp.head_dim), 2 * F16_MAX, np.float32)
    state = {"L01.attn.k_rope": big, "L01.attn.v": big, "slots": np.array([0]), **cache.buffers()}
    with pytest.raises(CacheOverflow, match=r"L01\.attn\.kv"):
        SyncExecutor(decoder.program, decoder.unit).run_op(op, state)
