"""Every unit against the reference, op by op; and planted faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.decode import Decoder, NonFinite
from engine.options import EngineOptions
from engine.package import Package
from engine.runtime.trace import Taps
from engine.units import load_unit, unit_names
from engine.units.faulty import parse

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
TOKENS = np.array([5, 90, 17, 17, 230, 64, 3])


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", [name for name in unit_names() if name != "reference"])
def test_a_unit_agrees_with_the_float64_reference_in_every_op(
    unit: str, kind: str, package_in: Callable[[str], Package]
) -> None:
    package = package_in(kind)
    exact, taps = Decoder(package, unit="reference", dtype=np.float64), Taps()
    exact.advance(TOKENS, taps=taps, all_logits=True)
    options = EngineOptions(unit=unit)  # op by op, with floats throughout
    batch, batch_taps = Decoder(package, options=options), Taps()
    batch.advance(TOKENS, taps=batch_taps, all_logits=True)
    steps, step_taps = Decoder(package, options=options), Taps()
    for token in TOKENS:
        steps.advance(np.array([token]), taps=step_taps)
    for op in exact.program.ops:
        for name in op.writes:
            wanted = taps.stacked(name)
            assert relative(batch_taps.stacked(name), wanted) < 1e-5, f"prefill, {name}"
            assert relative(step_taps.stacked(name), wanted) < 1e-5, f"decode, {name}"


def test_an_unknown_unit_lists_the_known(package_in: Callable[[str], Package]) -> None:
    with pytest.raises(ValueError, match=r"'npu' is not known; known: native, packed, reference"):
        load_unit("npu", package_in("F32"))


@pytest.mark.parametrize("op", ["L01.ffn.down", "L00.attn.q", "head.logits"])
def test_a_planted_scale_changes_its_op_and_nothing_before_it(
    op: str, package_in: Callable[[str], Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_in("Q4_1")
    clean, clean_taps = Decoder(package), Taps()
    clean.advance(TOKENS, taps=clean_taps)
    monkeypatch.setenv("ENGINE_FAULT", f"scale:1.02@{op}")
    faulty, taps = Decoder(package), Taps()
    faulty.advance(TOKENS, taps=taps)
    assert op in faulty.unit.name
    for earlier in clean.program.ops:
        same = all(
            np.array_equal(taps.stacked(name), clean_taps.stacked(name)) for name in earlier.writes
        )
        if earlier.id == op:
            assert relative(taps.stacked(op), clean_taps.stacked(op)) == pytest.approx(
                0.02, rel=1e-3
            )
            return
        assert same, earlier.id
    raise AssertionError(f"{op} is not in the program")


def test_a_planted_nan_stops_with_step_layer_and_op(
    package_in: Callable[[str], Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L01.attn.out")
    monkeypatch.setenv("ENGINE_FAULT_AFTER", "2")
    decoder = Decoder(package_in("F16"))
    decoder.advance(np.array([1]))
    decoder.advance(np.array([2]))
    with pytest.raises(
        NonFinite, match=r"step 2, op L01\.attn\.out: 1 of 64 values are NaN"
    ) as got:
        decoder.advance(np.array([3]))
    assert (got.value.step, got.value.layer, got.value.op) == (2, 1, "L01.attn.out")
    decoder.reset()  # steps count from 0 again
    with pytest.raises(NonFinite, match="step 0"):
        decoder.advance(np.array([1]))


@pytest.mark.parametrize(
    "fault", ["shift:1@L01.attn.rope", "stale@L00.attn.kv", "zero-row:5@L00.ffn.up"]
)
def test_other_planted_faults_change_the_logits(
    fault: str, package_in: Callable[[str], Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_in("F32")
    clean = Decoder(package).advance(TOKENS)
    monkeypatch.setenv("ENGINE_FAULT", fault)
    assert relative(Decoder(package).advance(TOKENS), clean) > 1e-3


@pytest.mark.parametrize("text", ["scale:1.02", "melt@L00.ffn.up", "scale:x@L00.ffn.up", "@"])
def test_a_fault_that_cannot_be_read_says_what_may_stand_there(text: str) -> None:
    with pytest.raises(ValueError, match="ENGINE_FAULT"):
        parse(text)
