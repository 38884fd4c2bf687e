"""Bad numbers in the native unit: found, named and counted as by the sync executor, never hanging;
and the decoder is of use afterwards. Planted faults work in compiled steps as anywhere."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import Decoder, NonFinite
from engine.formats import SyntheticCheckpoint
from engine.native.library import NativeUnavailable, load
from engine.options import EngineOptions
from engine.package import Package, build_package
from engine.runtime.state import CacheOverflow
from engine.runtime.trace import Taps

TOKENS = np.random.default_rng(8).integers(0, 200, 21)
POISONED = 222  # a token whose embedding, and nothing else, is bad
NATIVE = dataclasses.replace(EngineOptions.for_unit("native"), threads=3)
WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "unfused": {"fused": False},
    "floats": {"activations": "float"},
    "plain arrays": {"kv": "f32", "kv_layout": "numpy"},
}
Array = npt.NDArray[Any]
PackageOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def package_of(tmp_path_factory: pytest.TempPathFactory) -> PackageOf:
    """Path of a package of a family; two layers."""
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    folder = tmp_path_factory.mktemp("errors")

    def make(family: str) -> Path:
        path = folder / family
        if not path.exists():
            model = SyntheticCheckpoint(4, family=family, width=96, heads=6, kv_heads=3,
                                        head_dim=32, ffn=160, vocab=259)  # fmt: skip
            build_package(model, path, name=family, layout="interleaved", scheme="w4")
        return path

    return make


def spoiled(source: Path, target: Path, values: dict[tuple[str, str], dict[int, float]]) -> Package:
    """A copy with other numbers: (tensor, part) → {index in the flat part: number}."""
    shutil.copy(source, target)
    with Package.open(source) as package, target.open("r+b") as file:
        for (tensor, part), changes in values.items():
            array = package.tensors[tensor].parts[part]
            for index, number in changes.items():
                flat = np.array([number]).astype(array.dtype)
                file.seek(package.offset_of(array) + index % array.size * array.itemsize)
                file.write(flat.tobytes())
    return Package.open(target)


def failure(decoder: Decoder, steps: list[Array]) -> tuple[Any, ...]:
    """What the first error of some steps says; a decoder that had one can be used again."""
    try:
        for tokens in steps:
            decoder.advance(tokens)
    except NonFinite as error:
        decoder.reset()
        return type(error), error.step, error.op, error.layer, error.count, error.size, error.kind
    raise AssertionError("no error")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("tensor", "part", "number"),
    [
        ("L01.attn.q", "d", math.nan),
        ("L00.attn.v", "d", math.inf),
        ("L01.attn.norm", "data", math.nan),
        ("L01.ffn.gate", "d", -math.inf),
        ("L00.ffn.norm", "data", math.inf),
        ("L01.ffn.down", "d", math.nan),
        ("head.norm", "data", math.nan),
        ("head.logits", "d", math.nan),
    ],
)
def test_bad_weights_are_named_by_step_and_op_and_counted_as_sync_does(
    tensor: str,
    part: str,
    number: float,
    family: str,
    way: str,
    package_of: PackageOf,
    tmp_path: Path,
) -> None:
    package = spoiled(package_of(family), tmp_path / "bad", {(tensor, part): {16: number}})
    options = dataclasses.replace(NATIVE, **WAYS[way])
    sync = dataclasses.replace(options, executor="sync", threads=1)
    steps = [TOKENS[:9], TOKENS[:1]]
    for fed in (steps, steps[1:]):
        wanted = failure(Decoder(package, options=sync), fed)
        assert wanted[2].startswith(tensor.rpartition(".")[0]) and 0 < wanted[4] <= wanted[5]
        assert failure(Decoder(package, options=options), fed) == wanted
        tapped = Decoder(package, options=options)
        with pytest.raises(NonFinite, match=str(wanted[2])):
            tapped.advance(fed[0], taps=Taps())


@pytest.mark.parametrize("executor", ["sync", "async", "compiled"])
def test_a_bad_step_is_counted_and_the_next_ones_are_right(
    executor: str, package_of: PackageOf, tmp_path: Path
) -> None:
    with Package.open(package_of("llama")) as package:
        d = package.tensors["embed"].parts["d"]  # (R, K/32, 16)
        index = np.ravel_multi_index((POISONED // 16, 1, POISONED % 16), d.shape)
    bad = spoiled(package_of("llama"), tmp_path / "bad", {("embed", "d"): {int(index): math.nan}})
    options = dataclasses.replace(NATIVE, executor=executor)
    decoder, clean = (Decoder(bad, options=options) for _ in range(2))
    wanted = clean.advance(TOKENS, all_logits=True)
    assert np.array_equal(decoder.advance(TOKENS[:7], all_logits=True), wanted[:7])
    with pytest.raises(NonFinite, match=r"step 1, op embed\.tokens: 32 of 96 values are NaN"):
        decoder.advance(np.array([POISONED]))
    assert np.array_equal(decoder.advance(TOKENS[7:], all_logits=True), wanted[7:])
    with pytest.raises(NonFinite, match=r"step 2, op embed\.tokens: 64 of 288 values are NaN"):
        decoder.advance(np.array([POISONED, 1, POISONED]))
    decoder.reset()
    assert np.array_equal(decoder.advance(TOKENS, all_logits=True), wanted)
    for one in (decoder, clean):
        one.close()


def test_threads_that_fail_at_once_or_apart_never_wait_for_each_other(
    package_of: PackageOf, tmp_path: Path
) -> None:
    """Bad numbers for the first thread, for the last, for all; early ops, late ones, the last."""
    spots = [
        {("L00.attn.k", "d"): {0: math.nan}},
        {("L00.ffn.up", "d"): {-1: math.nan}},
        {("L01.ffn.down", "d"): {0: math.inf, -1: math.nan}},
        {("head.logits", "d"): {-40: math.nan, 3: math.nan}},
        {("L01.ffn.norm", "data"): {5: math.nan}},
    ]
    for number, spot in enumerate(spots):
        package = spoiled(package_of("llama"), tmp_path / str(number), spot)
        for threads in (2, 5):
            decoder = Decoder(package, options=dataclasses.replace(NATIVE, threads=threads))
            found = set()
            for repeat in range(60):
                decoder.reset()
                with pytest.raises(NonFinite) as caught:
                    decoder.advance(TOKENS[: 1 + repeat % 2 * 19])
                found.add((repeat % 2, str(caught.value)))
            assert len(found) == 2  # the same each time


# --- overflow of the cache -----------------------------------------------------------------------


class LargeKeys(SyntheticCheckpoint):
    """A qwen2 model whose keys have a bias that 16 bits do not hold."""

    def __init__(self, bias: float) -> None:
        super().__init__(4, family="qwen2", head_dim=32, heads=2, kv_heads=1, vocab=259)
        self.bias = np.float32(bias)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        found = super().float32(name)
        if name == "blk.1.attn_k.bias":
            found = np.array(found)
            found[7] += self.bias
        return found


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("executor", ["sync", "async", "compiled"])
@pytest.mark.parametrize("kv", ["f16", "int8", "int4"])
def test_an_overflow_of_the_cache_is_an_error_that_names_the_append(
    kv: str, executor: str, fused: bool, package_of: PackageOf, tmp_path: Path
) -> None:
    package_of("llama")
    largest = 65504 * {"f16": 1, "int8": 127, "int4": 7}[kv]
    logits = {}
    for bias in (largest / 2, largest * 2):
        path = tmp_path / str(bias)
        build_package(LargeKeys(bias), path, name="large", layout="interleaved", scheme="w8")
        options = dataclasses.replace(NATIVE, kv=kv, fused=fused, executor=executor, threads=2)
        decoder = Decoder(Package.open(path), options=options)
        if bias < largest:
            logits = {count: decoder.advance(TOKENS[:count]) for count in (5, 1)}
            assert all(np.isfinite(values).all() for values in logits.values())
            decoder.close()
            continue
        for number, count in enumerate((5, 1)):
            with pytest.raises(CacheOverflow, match=r"range of a cache in") as caught:
                decoder.advance(TOKENS[:count])
            error = caught.value
            assert (error.step, error.op, error.layer) == (0, "L01.attn.kv", 1)
            assert 0 < error.count < error.size == count * 2 * 32
            assert number == 0 or error.count <= 2
        decoder.close()


# --- planted faults ------------------------------------------------------------------------------

FAULTS = [
    "scale:1.02@L01.ffn.down",
    "scale:1.5@L01.attn.mix",
    "scale:0.5@L00.attn.kv",
    "scale:2@L00.attn.q",
    "scale:2@L00.attn.norm",
    "scale:1.1@embed.tokens",
    "scale:1.1@L01.ffn.add",
    "scale:3@head.logits",
    "zero-row:5@L00.ffn.up",
    "shift:1@L01.attn.rope",
    "stale@L00.attn.kv",
    "slow:1@L01.ffn.act",
    "leak:0.1@head.norm",
    "scale:1.02@L00.attn.k;stale@L00.attn.kv;zero-row:3@L01.attn.add",
]


@pytest.mark.parametrize(
    ("fault", "fused"),
    [*((fault, fused) for fault in FAULTS for fused in (True, False)),
     ("scale:1.1@L00.attn.qkv", True), ("zero-row:4@L01.ffn.gate_up", True)],
)  # fmt: skip
def test_a_fault_in_a_compiled_step_is_the_same_fault(
    fault: str, fused: bool, package_of: PackageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package.open(package_of("llama"))
    clean = Decoder(package, options=NATIVE).advance(TOKENS, all_logits=True)
    monkeypatch.setenv("ENGINE_FAULT", fault)
    found = {}
    for executor in ("sync", "compiled"):
        options = dataclasses.replace(NATIVE, executor=executor, fused=fused)
        decoder = Decoder(package, options=options)
        parts = [decoder.advance(TOKENS[:9], all_logits=True)]
        parts += [decoder.advance(TOKENS[at : at + 1])[None] for at in range(9, len(TOKENS))]
        found[executor] = np.concatenate(parts)
        assert fault in decoder.unit.name
    assert np.array_equal(found["compiled"], found["sync"])
    harmless = fault.startswith(("slow", "leak"))
    assert np.array_equal(found["compiled"], clean) == harmless


OPS = ["embed.tokens", "L00.attn.norm", "L01.attn.q", "L01.attn.rope", "L00.attn.kv",
       "L01.attn.mix", "L00.attn.out", "L01.ffn.gate", "L01.ffn.act", "L01.ffn.add", "head.norm",
       "head.logits"]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "fused"),
    [*((op, fused) for op in OPS for fused in (True, False)),
     ("L01.attn.qkv", True), ("L00.ffn.gate_up", True)],
)  # fmt: skip
def test_a_planted_nan_is_found_where_sync_finds_it(
    op: str, fused: bool, package_of: PackageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package.open(package_of("llama"))
    monkeypatch.setenv("ENGINE_FAULT", f"nan@{op}")
    monkeypatch.setenv("ENGINE_FAULT_AFTER", "1")
    found = []
    for executor in ("sync", "compiled"):
        options = dataclasses.replace(NATIVE, executor=executor, fused=fused)
        decoder = Decoder(package, options=options)
        decoder.advance(TOKENS[:6])
        found.append(failure(decoder, [TOKENS[6:7]]))
    assert found[0] == found[1]
    assert found[0][1] == 1  # the step


def test_a_fault_in_an_op_that_is_not_there_is_refused_when_a_step_is_compiled(
    package_of: PackageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L09.ffn.up")
    with pytest.raises(ValueError, match=r"no op 'L09.ffn.up' in this program; near: L00.ffn.up"):
        Decoder(Package.open(package_of("llama")), options=NATIVE)
