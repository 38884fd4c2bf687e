"""Planted faults that make an op compute something else, and faults with a condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from engine.decode import Decoder
from engine.options import EngineOptions
from engine.package import Package
from engine.quantize.schemes import dequantize
from engine.runtime.trace import Taps

TOKENS = np.array([5, 90, 17, 230, 64])
PLAIN = EngineOptions()


@pytest.fixture
def package(package_in: Callable[[str], Package]) -> Package:
    return package_in("Q4_0")


@pytest.fixture
def run(package: Package, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, np.ndarray]]:
    """Every buffer of a prefill, with a fault or without."""

    def go(fault: str | None = None, options: EngineOptions = PLAIN) -> dict[str, np.ndarray]:
        with monkeypatch.context() as patch:
            if fault:
                patch.setenv("ENGINE_FAULT", fault)
            decoder, taps = Decoder(package, options=options), Taps()
            decoder.advance(TOKENS, taps=taps, all_logits=True)
            decoder.close()
        return {name: taps.stacked(name) for name in taps.values}

    return go


def test_swapped_heads_change_places_and_nothing_else_of_the_op(
    run: Callable[..., dict[str, np.ndarray]], package: Package
) -> None:
    dim = package.hyperparameters.head_dim
    right, wrong = run(), run("swap-heads:1@L00.attn.mix")
    heads = right["L00.attn.mix"].reshape(len(TOKENS), -1, dim)
    got = wrong["L00.attn.mix"].reshape(len(TOKENS), -1, dim)
    assert np.array_equal(got[:, :2], heads[:, 1::-1])
    assert np.array_equal(got[:, 2:], heads[:, 2:])


def test_a_zero_point_that_is_off_by_one_is_that_of_the_dequantised_weights(
    run: Callable[..., dict[str, np.ndarray]], package: Package
) -> None:
    right, wrong = run(), run("zero-point:1@L00.ffn.up")
    tensor = package.tensors["L00.ffn.up"]
    off = dequantize(dataclasses.replace(tensor, zero=tensor.zero + 1))
    assert np.allclose(wrong["L00.ffn.up"], right["L00.ffn.norm"] @ off.T, atol=1e-4)
    assert not np.allclose(wrong["L00.ffn.up"], right["L00.ffn.up"], atol=1e-2)


@pytest.mark.parametrize("op", ["L00.ffn.act", "L01.attn.v", "L00.ffn.norm"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_error_that_its_readers_make_up_for_shows_in_its_op_alone(
    op: str, fused: bool, run: Callable[..., dict[str, np.ndarray]]
) -> None:
    options = dataclasses.replace(PLAIN, fused=fused)
    right, wrong = run(options=options), run(f"cancel:2@{op}", options)
    different = {name for name in right if not np.array_equal(right[name], wrong[name])}
    assert different <= {op}
    if op in right:
        assert np.array_equal(wrong[op], right[op] * 2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("swap-heads:1@L00.ffn.up", "expected an op that writes heads"),
        ("swap-heads:9@L00.attn.mix", "expected a head from 1 to"),
        ("zero-point:1@L00.attn.norm", "expected a linear op whose weights are integers"),
        ("cancel:2@L00.attn.kv", "expected an op that writes no cache"),
        ("nan@L00.ffn.up?speed=high", "condition 'speed=high'"),
        ("nan@L00.ffn.up?kv", "condition 'kv'"),
    ],
)
def test_a_fault_that_makes_no_sense_there_is_refused(
    fault: str, message: str, run: Callable[..., dict[str, np.ndarray]]
) -> None:
    with pytest.raises(ValueError, match=message):
        run(fault)


@pytest.mark.parametrize(
    ("condition", "options", "there"),
    [
        ("kv=f16", dataclasses.replace(PLAIN, kv="f16", kv_layout="sd"), True),
        ("kv=f16", PLAIN, False),
        ("pass=residual", dataclasses.replace(PLAIN, fused=True), True),
        (
            "pass=residual",
            dataclasses.replace(PLAIN, fused=True, passes_off=("residual",)),
            False,
        ),
        ("int8=L01", dataclasses.replace(PLAIN, activations="int8"), True),
        (
            "int8=L01",
            dataclasses.replace(PLAIN, activations="int8", float_layers=("L01",)),
            False,
        ),
        ("fused=true,executor=async", dataclasses.replace(PLAIN, fused=True), False),
        ("threads=none", PLAIN, True),
    ],
)
def test_a_fault_with_a_condition_is_there_only_while_the_engine_runs_so(
    condition: str,
    options: EngineOptions,
    there: bool,
    run: Callable[..., dict[str, np.ndarray]],
) -> None:
    right = run(options=options)["head.logits"]
    wrong = run(f"scale:3@L00.attn.v?{condition}", options)["head.logits"]
    assert np.array_equal(right, wrong) != there


def test_layers_may_keep_floats_where_activations_are_int8(
    run: Callable[..., dict[str, np.ndarray]], package: Package
) -> None:
    everywhere = run(options=dataclasses.replace(PLAIN, activations="int8"))
    layers = [f"L{layer:02}" for layer in range(package.hyperparameters.layers)]
    nowhere = dataclasses.replace(PLAIN, activations="int8", float_layers=(*layers, "head"))
    assert np.array_equal(run(options=nowhere)["head.logits"], run()["head.logits"])
    first = dataclasses.replace(PLAIN, activations="int8", float_layers=("L00",))
    kept = run(options=first)
    assert np.array_equal(kept["L00.ffn.add"], run()["L00.ffn.add"])
    assert not np.array_equal(everywhere["L00.ffn.add"], kept["L00.ffn.add"])
    with pytest.raises(ValueError, match="layer 'L77' is not known; known: L00, "):
        run(options=dataclasses.replace(PLAIN, activations="int8", float_layers=("L77",)))
