"""The program's own rules, and the RoPE variants against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.architectures.rope import Rope
from engine.program.ops import Op, Program


def program(*ops: Op) -> Program:
    return Program(ops, ("tokens",), "out", ("cache",))


def test_an_op_that_reads_what_nobody_wrote_is_refused() -> None:
    with pytest.raises(ValueError, match="op a reads 'ghost', which no earlier op writes"):
        program(Op("a", "add", ("tokens", "ghost"), ("out",)))


def test_a_buffer_written_twice_is_refused_but_a_cache_is_not() -> None:
    twice = Op("b", "add", ("tokens",), ("out",))
    with pytest.raises(ValueError, match="op b writes 'out', which an earlier op wrote"):
        program(Op("a", "add", ("tokens",), ("out",)), twice)
    program(
        Op("a", "kv_append", ("tokens",), ("cache",)),
        Op("b", "kv_append", ("tokens",), ("cache",)),
        Op("c", "add", ("cache",), ("out",)),
    )


def test_an_unknown_kind_and_a_repeated_id_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind 'warp'"):
        program(Op("a", "warp", ("tokens",), ("out",)))
    with pytest.raises(ValueError, match="used twice"):
        program(Op("a", "add", ("tokens",), ("x",)), Op("a", "add", ("x",), ("out",)))


def test_looking_up_an_op_names_near_ones() -> None:
    one = program(Op("L00.ffn.down", "add", ("tokens",), ("out",)))
    assert one.op("L00.ffn.down").layer == 0
    with pytest.raises(KeyError, match=r"L00\.ffn\.down"):
        one.op("L09.ffn.down")


def test_linear_scaling_divides_every_frequency() -> None:
    plain = Rope(64, 10000.0).inverse_frequencies()
    assert np.allclose(plain, [10000.0 ** (-2 * i / 64) for i in range(32)])
    assert np.allclose(Rope(64, 10000.0, "linear", factor=4).inverse_frequencies(), plain / 4)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    rope = Rope(128, 500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    plain = Rope(128, 500000.0).inverse_frequencies()
    scaled = rope.inverse_frequencies()
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    assert np.allclose(scaled[short], plain[short])
    assert np.allclose(scaled[long], plain[long] / 8)
    middle = ~short & ~long
    smooth = (8192 / wavelength[middle] - 1) / (4 - 1)
    expected = (1 - smooth) * plain[middle] / 8 + smooth * plain[middle]
    assert middle.any() and np.allclose(scaled[middle], expected)


def test_yarn_keeps_fast_turns_interpolates_slow_ones_and_scales_attention() -> None:
    rope = Rope(64, 10000.0, "yarn", 4.0, 2048)
    plain, scaled = Rope(64, 10000.0).inverse_frequencies(), rope.inverse_frequencies()
    turns = 2048 * plain / (2 * math.pi)
    assert np.allclose(scaled[turns > 40], plain[turns > 40])
    assert np.allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4)
    between = (turns < 20) & (turns > 2)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 4)).all()
    assert rope.scale == pytest.approx(0.1 * math.log(4) + 1)
    assert Rope(64, 1e4, "yarn", 4.0, 2048, attention_factor=1.5).scale == 1.5


def test_divisors_from_a_file_replace_the_rule() -> None:
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    found = Rope(64, 10000.0).inverse_frequencies(divisors)
    assert np.allclose(found * divisors, Rope(64, 10000.0).inverse_frequencies())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 1e4, "longrope"), "known: none, linear, llama3, yarn"),
        ((63, 1e4), "even"),
        ((64, -1.0), "above 0"),
        ((64, 1e4, "yarn", 4.0, 0), "original context"),
    ],
)
def test_impossible_rope_parameters_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rope(*arguments)
