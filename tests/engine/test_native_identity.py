"""What changes no bit of the native unit's results: executor, fusion, threads, taps, trace, and how
many tokens a step has. Instruction sets and the reference agree to rounding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint
from engine.native.features import detect
from engine.native.isa import ISAS, choose, machine_name
from engine.native.library import NativeUnavailable, load
from engine.native.weights import Weights
from engine.options import EngineOptions
from engine.package import Package, build_package
from engine.program.passes import pass_names
from engine.runtime.trace import Taps, Trace

KERNELS = [
    isa.name
    for isa in ISAS.get(machine_name(), ())
    if not choose(detect().common, isa.name).missing
]
TOKENS = np.random.default_rng(8).integers(0, 259, 44)
SIZES: dict[str, Any] = {"width": 96, "heads": 6, "kv_heads": 3, "head_dim": 32, "ffn": 160,
                         "vocab": 259, "context": 300}  # fmt: skip
# name → checkpoint, and how it is packed
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"tied": True, "biases": True}, {"layout": "interleaved", "scheme": "w4"}),
    "qwen2": ({"family": "qwen2"}, {"layout": "interleaved", "scheme": "w8-32a"}),
    "qwen3": ({"family": "qwen3"}, {"layout": "blocked", "scheme": "w4-32a"}),
    "floats": ({"family": "qwen3"}, {"layout": "row"}),
}
NATIVE = dataclasses.replace(EngineOptions.for_unit("native"), threads=2)
FLOAT = EngineOptions(unit="native", executor="compiled", threads=2)
Array = npt.NDArray[Any]
PackageOf = Callable[[str], Package]


@pytest.fixture(scope="module")
def package_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackageOf]:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    folder, opened = tmp_path_factory.mktemp("identity"), {}

    def make(name: str) -> Package:
        if name not in opened:
            model, packing = MODELS[name]
            path = folder / name
            build_package(SyntheticCheckpoint(5, **SIZES, **model), path, name=name, **packing)
            opened[name] = Package.open(path)
        return opened[name]

    yield make
    for package in opened.values():
        package.close()


def logits(package: Package, options: EngineOptions, context: int = 64, **more: Any) -> Array:
    """(T + 12, V): a prefill, then steps, each with the likeliest token of the one before."""
    decoder = Decoder(package, options=options, context=context, **more)
    found = [decoder.advance(TOKENS, all_logits=True)]
    for _ in range(12):
        found.append(decoder.advance(found[-1][-1:].argmax(axis=-1))[None])
    decoder.close()
    return np.concatenate(found)


def changed(options: EngineOptions, **changes: Any) -> EngineOptions:
    return dataclasses.replace(options, **changes)


WAYS = {
    "as the unit runs best": {},
    "floats": {"activations": "float"},
    "unfused": {"fused": False},
    "plain arrays": {"kv": "f32", "kv_layout": "numpy"},
    "int8 cache by rows": {"kv": "int8", "kv_layout": "sd"},
    "int4 cache by panels": {"kv": "int4", "kv_layout": "ds"},
    "a ring": {"keep": 5},
    "a ring of floats": {"keep": 0, "activations": "float", "kv": "f32"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_executors_and_threads_change_no_bit(model: str, way: str, package_of: PackageOf) -> None:
    options = changed(NATIVE, **WAYS[way])
    context = 48 if options.keep is not None else 64  # the ring turns
    wanted = logits(package_of(model), options, context)
    for executor in ("sync", "async"):
        other = changed(options, executor=executor)
        assert np.array_equal(logits(package_of(model), other, context), wanted), executor
    for threads in (1, 3, 5):
        other = changed(options, threads=threads)
        assert np.array_equal(logits(package_of(model), other, context), wanted), threads


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("model", MODELS)
def test_no_set_of_passes_changes_a_bit(
    model: str, activations: str, package_of: PackageOf
) -> None:
    options = changed(NATIVE, activations=activations)
    wanted = logits(package_of(model), changed(options, fused=False))
    names = pass_names()
    for count in range(len(names) + 1):
        for off in itertools.combinations(names, count):
            found = logits(package_of(model), changed(options, passes_off=off))
            assert np.array_equal(found, wanted), off


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
def test_a_step_of_many_tokens_is_many_steps_of_one_to_the_bit(
    model: str, kernels: str, package_of: PackageOf
) -> None:
    options = changed(NATIVE, kernels=kernels, threads=3)
    whole = Decoder(package_of(model), options=options).advance(TOKENS, all_logits=True)
    steps = Decoder(package_of(model), options=options)
    assert np.array_equal([steps.advance(TOKENS[at : at + 1]) for at in range(len(TOKENS))], whole)


@pytest.mark.parametrize("model", MODELS)
def test_looking_changes_no_bit_and_nor_does_running_again(
    model: str, package_of: PackageOf
) -> None:
    package = package_of(model)
    plain = Decoder(package, options=NATIVE)
    wanted = [plain.advance(TOKENS, all_logits=True), plain.advance(TOKENS[:1])]
    traced, trace = Decoder(package, options=NATIVE, trace=Trace(100)), Taps(["L01.attn.mix"])
    for taps in (None, trace, Taps()):
        traced.reset()
        assert np.array_equal(traced.advance(TOKENS, taps=taps, all_logits=True), wanted[0])
        assert np.array_equal(traced.advance(TOKENS[:1], taps=taps), wanted[1])
    plain.reset()
    plain.warm_up()
    assert plain.position == plain.executor.step == 0
    assert np.array_equal(plain.advance(TOKENS, all_logits=True), wanted[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_taps_copy_the_same_buffers_whatever_runs_the_program(
    model: str, fused: bool, package_of: PackageOf
) -> None:
    found = {}
    for executor in ("sync", "async", "compiled"):
        decoder = Decoder(
            package_of(model), options=changed(NATIVE, fused=fused, executor=executor)
        )
        taps = Taps()
        decoder.advance(TOKENS, taps=taps)
        decoder.advance(TOKENS[:1], taps=taps)
        decoder.close()
        found[executor] = {name: taps.stacked(name) for name in taps.values}
    assert found["sync"].keys() == found["async"].keys() == found["compiled"].keys()
    for name, wanted in found["sync"].items():
        assert np.array_equal(found["async"][name], wanted), name
        assert np.array_equal(found["compiled"][name], wanted), name


@pytest.mark.parametrize("fault", ["", "slow:1@L01.ffn.up", "slow:1@L00.attn.qkv"])
@pytest.mark.parametrize("model", MODELS)
def test_a_trace_has_one_row_for_each_op_in_order(
    model: str, fault: str, package_of: PackageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an op takes several commands, or is run by itself for a fault in it."""
    monkeypatch.setenv("ENGINE_FAULT", fault)
    trace, capacity = Trace(1000), 1000
    decoder = Decoder(package_of(model), options=NATIVE, trace=trace)
    for count in (20, 1, 1):
        decoder.advance(TOKENS[:count])
    ops = len(decoder.program.ops)
    rows = trace.rows()
    assert trace.recorded == len(rows) == 3 * ops < capacity
    assert rows[:, 0].tolist() == [0] * ops + [1] * ops + [2] * ops
    assert rows[:, 1].tolist() == list(range(ops)) * 3
    assert (rows[:, 2] <= rows[:, 3]).all() and (rows[1:, 2] >= rows[:-1, 3]).all()
    if fault:
        slow = next(i for i, op in enumerate(decoder.program.ops) if op.inner(fault[7:]))
        assert (np.diff(rows[slow::ops, 2:]) >= 1e6).all()


@pytest.mark.parametrize("way", ["floats", "unfused", "as the unit runs best"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_instruction_set_agrees_with_the_reference_to_rounding(
    model: str, kernels: str, way: str, package_of: PackageOf
) -> None:
    """With int8 activations a value may fall to the other side of a step: one in 127 of it."""
    options = changed(NATIVE, kernels=kernels, **WAYS[way])
    reference = changed(options, unit="reference", executor="sync", threads=None, kernels=None)
    found, wanted = (
        Decoder(package_of(model), options=each).advance(TOKENS, all_logits=True)
        for each in (options, reference)
    )
    exact = options.activations == "float" or model == "floats"
    # The cache's float16 rounds what differs by a rounding to neighbours, 1/2048 apart.
    limit = 1e-3 if exact else 3e-2
    assert np.linalg.norm(found - wanted) < limit * np.linalg.norm(wanted)


def test_a_package_that_is_closed_stays_mapped_for_the_decoder_that_runs_on_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.pkg"
    build_package(
        SyntheticCheckpoint(5, **SIZES), path, name="x", layout="interleaved", scheme="w4"
    )
    package = Package.open(path)
    decoder = Decoder(package, options=NATIVE)
    wanted = decoder.advance(TOKENS)
    package.close()
    path.unlink()
    decoder.reset()
    assert np.array_equal(decoder.advance(TOKENS), wanted)


def test_the_kernel_is_asked_for_huge_pages_in_memory_of_our_own(package_of: PackageOf) -> None:
    package = package_of("llama")
    weights = Weights(package, huge_pages=True)
    part = next(iter(next(iter(package.tensors.values())).parts.values()))
    flags = flags_at(weights.address(part))
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("needs a kernel with transparent huge pages")
    assert "hg" in flags  # advised
    assert "sh" not in flags  # shared memory has a switch of its own, most often off


def flags_at(address: int) -> list[str]:
    """VmFlags of the mapping at an address, proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise LookupError(hex(address))


def test_huge_pages_change_no_bit(package_of: PackageOf) -> None:
    for model in MODELS:
        wanted = logits(package_of(model), NATIVE)
        huge = changed(NATIVE, huge_pages=True)
        assert np.array_equal(logits(package_of(model), huge), wanted), model
