"""A plan: what fits, how fast at most, which scheme first; against what packages really weigh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.architectures import Hyperparameters
from engine.formats.synthetic import SyntheticCheckpoint
from engine.measure.memory import Limits
from engine.package import Package, build_package
from harness.planning import REACHED, SCHEMES, Own, Plan, beyond_ceiling, make_plan, weight_bytes

# Of SmolLM2-135M.
HP = Hyperparameters(
    architecture="llama", vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64,
    ffn=1536, context=8192, rms_eps=1e-5, rope="none", rope_scale=1.0, tied=True, qkv_bias=False,
    output_bias=False, qk_norm=False,
)  # fmt: skip
FLOAT_FILE = Own("F16 file", 269_000_000)
Q4_FILE = Own("Q4_1 file", 96_600_000)


def plan(memory: float = 2000.0, **more: object) -> Plan:
    values = {"context": 2048, "bandwidth_gb_s": 5.0, "own": FLOAT_FILE, **more}
    return make_plan(HP, Limits(memory=memory, reserve=100.0), **values)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(("scheme", "packed"), [("w8", "w8-32"), ("w4", "w4-32")])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_weigh_what_a_package_of_that_scheme_does(
    scheme: str, packed: str, tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.package"
    source = SyntheticCheckpoint(
        seed=1, layers=3, width=128, heads=4, kv_heads=2, ffn=384, vocab=1024, tied=tied
    )
    build_package(source, path, name="m", layout="row", scheme=packed)
    with Package.open(path) as package:
        known = next(one for one in SCHEMES if one.name == scheme)
        assert weight_bytes(package.hyperparameters, known) == pytest.approx(
            package.weight_bytes, rel=0.01
        )


def test_the_ceiling_is_the_bandwidth_over_the_bytes_of_a_token() -> None:
    found = {(row.weights, row.kv): row for row in plan().rows}
    row = found["F16 file", "f16"]
    assert row.ceiling_start == pytest.approx(5e9 / 269e6)
    cached = 2048 * 30 * 3 * 64 * 2 * 2
    assert row.ceiling_end == pytest.approx(5e9 / (269e6 + cached), rel=0.01)
    assert found["w4", "int4"].ceiling_end > found["w4", "f16"].ceiling_end
    assert all(row.ceiling_end is None for row in plan(bandwidth_gb_s=None).rows)


def test_the_longest_context_is_the_last_that_fits() -> None:
    limits = Limits(memory=400.0, reserve=100.0)
    row = next(r for r in plan(400.0).rows if (r.weights, r.kv) == ("w8", "f16"))
    assert 2048 < row.longest < HP.context

    def at(context: int) -> bool:
        rows = make_plan(HP, limits, context=context).rows
        return next(r for r in rows if (r.weights, r.kv) == ("w8", "f16")).fits

    assert at(row.longest) and not at(row.longest + 1)


def test_what_is_free_right_now_is_no_limit() -> None:
    limits = Limits(memory=2000.0, reserve=100.0, available=1.0)
    assert make_plan(HP, limits, context=2048).choice is not None


def test_a_float_file_is_tried_in_w8_first() -> None:
    found = plan()
    assert found.choice is not None
    assert (found.choice.weights, found.choice.kv) == ("w8", "f16")
    assert "half the bytes" in found.reason


def test_a_quantised_file_is_tried_as_it_is() -> None:
    found = plan(own=Q4_FILE)
    assert found.choice is not None and found.choice.weights == "Q4_1 file"
    assert "without loss" in found.reason


def test_memory_moves_the_choice_and_the_reason_says_so() -> None:
    narrow = plan(330.0)  # w8 with f16 keys and values needs some 240 of 230
    assert narrow.choice is not None
    assert (narrow.choice.weights, narrow.choice.kv) == ("w8", "int8")
    assert "more than the board's memory" in narrow.reason
    nothing = plan(150.0)
    assert nothing.choice is None
    assert "Nothing fits" in nothing.reason and "smaller model" in nothing.reason


def test_a_context_that_is_too_long_is_told_with_one_that_fits() -> None:
    found = make_plan(HP, Limits(memory=330.0, reserve=100.0), context=8192, own=FLOAT_FILE)
    longest = max(row.longest for row in found.rows)
    fitting = [row for row in found.rows if row.fits]
    assert found.choice is None or found.choice in fitting
    tight = make_plan(HP, Limits(memory=265.0, reserve=100.0), context=8192, own=FLOAT_FILE)
    assert tight.choice is None
    assert f"fits up to {max(row.longest for row in tight.rows)} positions" in tight.reason
    assert longest > max(row.longest for row in tight.rows)


def test_a_speed_that_the_budget_asks_for_moves_the_choice() -> None:
    rows = {(row.weights, row.kv): row for row in plan().rows}
    floor = REACHED * rows["w8", "int4"].ceiling_end * 1.01  # type: ignore[operator]  # is known
    found = plan(floor=floor)
    assert found.choice is not None and found.choice.weights == "w4"
    assert "too slow" in found.reason
    hopeless = plan(floor=1000.0)
    assert hopeless.choice is not None and "expect too little" in hopeless.reason
    unknown = plan(floor=1000.0, bandwidth_gb_s=None)
    assert unknown.choice is not None and "not known" in unknown.reason


def test_a_speed_above_its_ceiling_is_not_left_unsaid() -> None:
    found = plan()
    top = found.rows[0].ceiling_start or 0.0
    assert "above the ceiling" in beyond_ceiling(found, "F16 file", 1.01 * top)
    assert beyond_ceiling(found, "F16 file", 0.99 * top) == ""
    assert beyond_ceiling(found, "F16 file", None) == ""
    assert beyond_ceiling(plan(bandwidth_gb_s=None), "F16 file", top) == ""


def test_bytes_follow_the_models_own_shapes() -> None:
    w8 = next(scheme for scheme in SCHEMES if scheme.name == "w8")
    assert weight_bytes(dataclasses.replace(HP, layers=31), w8) > weight_bytes(HP, w8)
    with_bias = dataclasses.replace(HP, qkv_bias=True)
    assert weight_bytes(with_bias, w8) - weight_bytes(HP, w8) == 30 * (9 + 2 * 3) * 64 * 4
