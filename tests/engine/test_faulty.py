"""Planted faults in fused programs, under every executor, and which faults cannot be planted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.decode import Decoder
from engine.native.library import NativeUnavailable
from engine.options import EngineOptions
from engine.package import Package
from engine.program.passes import apply
from engine.runtime.async_ import AsyncExecutor
from engine.runtime.sync import NonFinite, SyncExecutor
from engine.runtime.trace import Taps
from engine.units import load_unit, unit_names
from engine.units.faulty import Faulty, plant

TOKENS = np.array([5, 90, 17, 17, 230, 64, 3])


@pytest.fixture
def package(package_in: Callable[[str], Package]) -> Package:
    return package_in("Q4_1")


def run(
    package: Package, fault: str | None = None, *, fused: bool, asynchronous: bool = False
) -> Taps:
    """A prefill and three steps, with faults or without."""
    decoder, taps = Decoder(package), Taps()
    decoder.unit = plant(decoder.unit, fault) if fault else decoder.unit
    decoder.program = apply(decoder.program) if fused else decoder.program
    if asynchronous:
        decoder.executor = AsyncExecutor(decoder.program, decoder.unit)  # type: ignore[assignment]
    else:
        decoder.executor = SyncExecutor(decoder.program, decoder.unit)
    try:
        decoder.advance(TOKENS[:4], taps=taps, all_logits=True)
        for token in TOKENS[4:]:
            decoder.advance(np.array([token]), taps=taps)
    finally:
        decoder.executor.close()
    return taps


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        "scale:1.02@L01.attn.out",  # also the id of a fused op
        "scale:1.02@L00.ffn.up",
        "shift:1@L01.attn.rope",
        "stale@L00.attn.kv",
        "scale:1.5@L00.attn.kv",
        "zero-row:5@L00.ffn.norm",
        "scale:1.02@L00.attn.q;scale:3@L00.attn.q;zero-row:2@L01.ffn.act",
    ],
)
def test_a_fault_in_a_part_of_a_fused_op_is_the_fault_of_the_op_alone(
    fault: str, asynchronous: bool, package: Package
) -> None:
    clean = run(package, fused=False)
    alone = run(package, fault, fused=False)
    fused = run(package, fault, fused=True, asynchronous=asynchronous)
    assert not np.array_equal(clean.stacked("head.logits"), alone.stacked("head.logits"))
    for name in fused.values:
        assert np.array_equal(fused.stacked(name), alone.stacked(name)), name


def test_a_fault_in_a_fused_op_as_a_whole_changes_all_it_writes(package: Package) -> None:
    clean = run(package, fused=True)
    found = run(package, "scale:2@L01.attn.qkv", fused=True)
    for name in ("L01.attn.q", "L01.attn.k", "L01.attn.v"):
        assert np.array_equal(found.stacked(name)[:4], clean.stacked(name)[:4] * 2)
    assert np.array_equal(found.stacked("L00.ffn.add"), clean.stacked("L00.ffn.add"))


def test_a_fault_of_both_a_part_and_its_whole_is_both(package: Package) -> None:
    clean = run(package, fused=True)
    found = run(package, "scale:2@L01.attn.qkv;scale:2@L01.attn.q", fused=True)
    assert np.array_equal(found.stacked("L01.attn.q")[:4], clean.stacked("L01.attn.q")[:4] * 4)
    assert np.array_equal(found.stacked("L01.attn.k")[:4], clean.stacked("L01.attn.k")[:4] * 2)


@pytest.mark.parametrize("executor", ["sync", "async"])
@pytest.mark.parametrize("unit", unit_names())
def test_a_nan_inside_a_fused_op_names_the_fused_op(
    unit: str, executor: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L01.ffn.norm")
    monkeypatch.setenv("ENGINE_FAULT_AFTER", "3")
    try:
        decoder = Decoder(package, options=EngineOptions(unit=unit, executor=executor, fused=True))
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    for token in TOKENS[:3]:
        decoder.advance(np.array([token]))
    with pytest.raises(NonFinite) as caught:
        decoder.advance(TOKENS[3:4])
    decoder.close()
    assert (caught.value.step, caught.value.op, caught.value.layer) == (3, "L01.ffn.gate_up", 1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("scale:2@L07.ffn.down", r"no op 'L07.ffn.down' in this program; near: L00.ffn.down"),
        ("scale:2@L00.ffn.dwon", r"no op 'L00.ffn.dwon' in this program; near: L00.ffn.down"),
        ("scale:2@L00.attn.qkv", r"no op 'L00.attn.qkv' in this program; near: "),
        (
            "shift:1@L00.attn.q",
            r"shift cannot be planted in L00.attn.q, an op of kind linear; expected one of kind "
            r"rope, such as L00.attn.rope",
        ),
        (
            "stale@L01.attn.mix",
            r"stale cannot be planted in L01.attn.mix, an op of kind attention; expected one of "
            r"kind kv_append, such as L00.attn.kv",
        ),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused_before_the_first_step(
    fault: str, message: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", fault)
    with pytest.raises(ValueError, match=f"ENGINE_FAULT: {message}"):
        Decoder(package)


def test_a_fused_program_takes_faults_in_fused_ops(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = apply(Decoder(package).program)
    monkeypatch.setenv("ENGINE_FAULT", "slow:1@L00.attn.qkv;slow:1@L00.ffn.gate")
    unit = load_unit("packed", package)
    assert isinstance(unit, Faulty)
    SyncExecutor(program, unit)
    planted = [op.id for op in program.ops if unit.planted(op)]
    assert planted == ["L00.attn.qkv", "L00.ffn.gate_up"]


def test_the_number_of_executions_before_a_fault_is_a_number(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "slow:1@L00.attn.q")
    monkeypatch.setenv("ENGINE_FAULT_AFTER", "soon")
    with pytest.raises(ValueError, match="ENGINE_FAULT_AFTER is 'soon', expected a whole number"):
        load_unit("packed", package)
