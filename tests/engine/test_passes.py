"""Fusion passes: what they make, that any subset of them is valid, and that numbers stay."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decode import Decoder
from engine.package import Package
from engine.program.ops import Op, Program, fuse, fused_op
from engine.program.passes import apply, int8_activations, pass_names, separate_dequantisation
from engine.quantize.activations import dequantise, quantise
from engine.runtime.sync import SyncExecutor
from engine.runtime.trace import Taps

TOKENS = np.array([5, 90, 17, 17, 230, 64, 3])
SUBSETS = [off for count in range(7) for off in itertools.combinations(sorted(pass_names()), count)]


def run(package: Package, program: Program, unit: str = "reference", **options: object) -> Taps:
    """A prefill of four tokens and three steps; taps hold every visible buffer."""
    decoder, taps = Decoder(package, unit=unit, **options), Taps()
    decoder.program = program
    decoder.executor = SyncExecutor(program, decoder.unit)
    decoder.advance(TOKENS[:4], taps=taps, all_logits=True)
    for token in TOKENS[4:]:
        decoder.advance(np.array([token]), taps=taps)
    return taps


def unfused(package: Package) -> Program:
    return Decoder(package).program


def test_the_six_passes_are_found_in_their_order() -> None:
    assert pass_names() == (
        "qkv",
        "gate_up",
        "activation",
        "norm_input",
        "residual",
        "attention",
    )


def test_all_passes_leave_five_ops_a_layer(package_in: Callable[[str], Package]) -> None:
    program = apply(unfused(package_in("Q4_1")))
    layer = [op for op in program.ops if op.layer == 1]
    assert [op.id for op in layer] == [
        "L01.attn.qkv",
        "L01.attn.mix",
        "L01.attn.out",
        "L01.ffn.gate_up",
        "L01.ffn.down",
    ]
    assert [op.id for op in program.ops if op.layer is None] == [
        "embed.tokens",
        "head.select",
        "head.logits",
    ]
    qkv, _, out, gate_up, down = layer
    assert [part.id.rpartition(".")[2] for part in qkv.parts] == ["norm", "q", "k", "v"]
    assert gate_up.writes == ("L01.ffn.act",) and gate_up.reads == ("L01.attn.add",)
    assert out.writes == ("L01.attn.add",) and down.writes == ("L01.ffn.add",)


@pytest.mark.parametrize("off", SUBSETS, ids=lambda off: "+".join(off) or "none")
def test_every_subset_of_passes_gives_the_same_bits(
    off: tuple[str, ...], package_in: Callable[[str], Package]
) -> None:
    package = package_in("Q4_1")
    plain = unfused(package)
    program = apply(plain, off)
    assert list(program.flat()) == list(plain.ops)
    if len(off) == len(pass_names()):
        assert program == plain
    wanted, found = run(package, plain), run(package, program)
    assert {name for op in program.ops for name in op.writes} == set(found.values)
    for name in found.values:
        assert np.array_equal(found.stacked(name), wanted.stacked(name)), name


@pytest.mark.parametrize("name", sorted(pass_names()))
def test_a_pass_alone_changes_the_program_unless_it_builds_on_another(
    name: str, package_in: Callable[[str], Package]
) -> None:
    plain = unfused(package_in("F32"))
    program = apply(plain, set(pass_names()) - {name})
    assert (program == plain) == (name == "activation")
    assert apply(program, set(pass_names()) - {name}) == program, "a second time does nothing"


def test_an_unknown_pass_lists_the_known(package_in: Callable[[str], Package]) -> None:
    with pytest.raises(ValueError, match=r"'kqv' is not known; known: qkv, gate_up, activation"):
        apply(unfused(package_in("F32")), ["qkv", "kqv"])


def test_norms_of_single_heads_go_along_with_the_projections() -> None:
    heads = {"heads": 2}
    program = Program(
        (
            Op("norm", "rmsnorm", ("x",), ("norm",), ("n",)),
            Op("L00.attn.q", "linear", ("norm",), ("q",), ("wq",)),
            Op("L00.attn.k", "linear", ("norm",), ("k",), ("wk",)),
            Op("L00.attn.v", "linear", ("norm",), ("v",), ("wv",)),
            Op("L00.attn.q_norm", "rmsnorm", ("q",), ("qn",), ("nq",), heads),
            Op("L00.attn.k_norm", "rmsnorm", ("k",), ("kn",), ("nk",), heads),
            Op("mix", "attention", ("qn", "kn", "v"), ("out",)),
        ),
        ("x",),
        "out",
        (),
    )
    fused, mix = apply(program).ops
    assert fused.id == "L00.attn.qkv" and fused.reads == ("x",)
    assert fused.writes == ("v", "qn", "kn")
    assert fused.weights == ("n", "wq", "wk", "wv", "nq", "nk")
    assert mix.id == "mix"


def test_a_norm_that_two_ops_read_stays_alone() -> None:
    program = Program(
        (
            Op("norm", "rmsnorm", ("x",), ("norm",), ("n",)),
            Op("a", "linear", ("norm",), ("a",), ("wa",)),
            Op("b", "linear", ("norm",), ("b",), ("wb",)),
            Op("c", "add", ("a", "b"), ("out",)),
        ),
        ("x",),
        "out",
        (),
    )
    kept = apply(program)
    assert [op.id for op in kept.ops] == ["norm", "a", "b"]
    assert kept.ops[-1].writes == ("out",)


def test_a_fused_op_that_contradicts_its_parts_is_refused() -> None:
    parts = (Op("a", "add", ("x", "x"), ("y",)), Op("b", "add", ("y", "x"), ("out",)))
    good = fused_op("b", parts, {"out"}, ())
    assert good.reads == ("x",) and good.writes == ("out",)

    def program(*ops: Op) -> Program:
        return Program(ops, ("x",), "out", ())

    program(good)
    for change, message in [
        ({"reads": ("x", "x", "y")}, r"op b reads \['x', 'x', 'y'\], its parts read \['x'\]"),
        ({"writes": ("out", "z")}, "writes 'z', which none of its parts writes"),
        ({"weights": ("w",)}, "its parts have"),
        ({"attributes": {"parts": ()}}, "needs its parts"),
        ({"attributes": {"parts": (good,)}}, "part b has kind 'fused'"),
    ]:
        with pytest.raises(ValueError, match=message):
            program(dataclasses.replace(good, **change))
    with pytest.raises(ValueError, match="reads 'y', which no earlier op writes; a fused op keeps"):
        program(good, Op("c", "add", ("y", "y"), ("z",)))
    with pytest.raises(ValueError, match="id is used twice"):
        program(good, Op("a", "add", ("out", "out"), ("z",)))


def test_ops_that_would_move_past_their_reader_are_not_fused() -> None:
    program = Program(
        (
            Op("a", "add", ("x", "x"), ("a",)),
            Op("b", "add", ("a", "a"), ("b",)),
            Op("c", "add", ("a", "b"), ("out",)),
        ),
        ("x",),
        "out",
        (),
    )
    with pytest.raises(ValueError, match="op b reads 'a', which no earlier op writes"):
        fuse(program, {"ac": [program.ops[0], program.ops[2]]})
    cached = Program(
        (
            Op("kv", "kv_append", ("x", "x", "x"), ("k",)),
            Op("other", "add", ("k", "x"), ("other",)),
            Op("mix", "attention", ("x", "k"), ("out",)),
        ),
        ("x",),
        "out",
        ("k",),
    )
    with pytest.raises(ValueError, match="op other needs kv, which mix would do after it"):
        fuse(cached, {"mix": [cached.ops[0], cached.ops[2]]})


def test_parts_are_found_by_id_and_the_fused_op_before_its_namesake(
    package_in: Callable[[str], Package],
) -> None:
    program = apply(unfused(package_in("F32")))
    assert program.op("L01.attn.q").kind == "linear"
    assert program.op("L01.attn.out").kind == "fused"
    inner = program.op("L01.attn.out").inner("L01.attn.out")
    assert inner is not None and inner.kind == "linear"
    with pytest.raises(KeyError, match=r"no op 'L09.attn.q' in this program; near: L00.attn.q"):
        program.op("L09.attn.q")


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1), st.floats(-30, 30, width=32)
)
def test_int8_activations_are_within_half_a_step(
    tokens: int, groups: int, seed: int, exponent: float
) -> None:
    generator = np.random.default_rng(seed)
    x = (generator.standard_normal((tokens, groups * 32)) * 10.0**exponent).astype(np.float32)
    q, scale = quantise(x)
    assert q.dtype == np.int8 and scale.dtype == np.float32
    assert q.shape == x.shape and scale.shape == (tokens, groups)
    largest = np.abs(x.reshape(tokens, groups, 32)).max(axis=-1)
    assert np.array_equal(scale, largest / np.float32(127))
    assert (
        np.abs(q.reshape(tokens, groups, 32)).max(axis=-1).tolist()
        == np.full((tokens, groups), 127).tolist()
    )
    error = np.abs(dequantise(q, scale, np.float64) - x).reshape(tokens, groups, 32)
    assert (error <= scale[..., None] * 0.5001).all()


def test_half_steps_round_to_even_and_zeros_stay_zero() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = 127, 0.5, 1.5, 2.5, -0.5, -1.5
    q, scale = quantise(x)
    assert q[0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert scale.tolist() == [[1.0, 0.0]] and not q[0, 32:].any()
    assert not quantise(np.full((1, 32), 1e-44, np.float32))[0].any(), "too small to matter"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_activation_stays_bad(bad: float) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 40] = bad
    back = dequantise(*quantise(x))
    assert np.isfinite(back[0, :32]).all() and np.isnan(back[0, 32:]).all()


def test_odd_widths_cannot_have_int8_activations() -> None:
    with pytest.raises(ValueError, match="48 inputs cannot be quantised in groups of 32"):
        quantise(np.zeros((1, 48), np.float32))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0", "Q8_0"])
def test_int8_activations_mean_the_same_in_every_unit(
    kind: str, package_in: Callable[[str], Package]
) -> None:
    package = package_in(kind)
    program = int8_activations(apply(unfused(package)), package)
    linears = [part for part in program.flat() if part.kind == "linear"]
    assert all(part.attributes.get("activations") == "int8" for part in linears)
    # Op by op, on the same inputs: a rounding of the input that differs by one step is no error of
    # the op that comes after.
    exact = run(package, program, dtype=np.float64)
    plain = run(package, unfused(package), dtype=np.float64)
    for unit, options in [("reference", {"dtype": np.float32}), ("packed", {})]:
        decoder = Decoder(package, unit=unit, **options)
        for op in linears:
            if op.reads[0] not in plain.values:
                continue
            x = plain.stacked(op.reads[0]).astype(np.float32)
            results = []
            for chosen in (decoder.unit, Decoder(package, unit="reference", dtype=np.float64).unit):
                state = {op.reads[0]: x.astype(chosen.dtype)}
                chosen.execute(op, state)
                results.append(state[op.writes[0]])
            difference = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1])
            assert difference < 1e-6, f"{unit}, {op.id}"
    logits, wanted = exact.stacked("head.logits"), plain.stacked("head.logits")
    relative = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < relative < 0.05, "int8 inputs change the numbers, and not by much"


def test_float_weights_keep_float_activations(package_in: Callable[[str], Package]) -> None:
    package = package_in("F16")
    program = unfused(package)
    assert int8_activations(program, package) == program


def test_separate_dequantisation_marks_every_linear_part(
    package_in: Callable[[str], Package],
) -> None:
    package = package_in("Q4_1")
    program = separate_dequantisation(apply(unfused(package)))
    marked = [part for part in program.flat() if part.attributes.get("dequantise") == "before"]
    assert [part.kind for part in marked] == ["linear"] * (7 * 2 + 1)
    wanted, found = run(package, unfused(package)), run(package, program)
    assert np.array_equal(found.stacked("head.logits"), wanted.stacked("head.logits"))


def test_unknown_activations_are_refused(package_in: Callable[[str], Package]) -> None:
    unit = Decoder(package_in("F32")).unit
    op = Op("a", "linear", ("x",), ("y",), ("L00.ffn.up",), {"activations": "int4"})
    with pytest.raises(ValueError, match="op a: activations 'int4', expected float or int8"):
        unit.execute(op, {"x": np.zeros((1, 64), np.float32)})
