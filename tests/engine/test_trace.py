"""The ring of a trace, whoever fills it; taps of parts; and that executors are alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decode import Decoder
from engine.package import Package
from engine.program.passes import apply
from engine.program.shapes import BufferShape, buffer_shapes
from engine.runtime.async_ import AsyncExecutor
from engine.runtime.base import Executor
from engine.runtime.sync import SyncExecutor
from engine.runtime.trace import Taps, Trace

TOKENS = np.array([5, 90, 17])


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=8))
def test_rows_recorded_and_rows_added_share_one_ring(
    capacity: int, pieces: list[tuple[bool, int]]
) -> None:
    trace, wanted = Trace(capacity), []
    number = 0
    for together, count in pieces:
        rows = [(number + i, i, 10 * (number + i), 10 * (number + i) + 5) for i in range(count)]
        number += count
        wanted += rows
        if together:
            trace.extend(np.array(rows, np.int64).reshape(-1, 4))
        else:
            for row in rows:
                trace.record(*row)
    assert trace.recorded == len(wanted)
    assert [tuple(row) for row in trace.rows().tolist()] == wanted[-capacity:]


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trace rows have shape \(2, 3\), expected \(n, 4\)"):
        Trace(4).extend(np.zeros((2, 3), np.int64))


def test_a_part_is_tapped_with_its_fused_op(package_in: Callable[[str], Package]) -> None:
    decoder, taps = Decoder(package_in("F32")), Taps(["L01.attn.kv", "L00.ffn.gate"])
    program = apply(decoder.program)
    decoder.program, decoder.executor = program, SyncExecutor(program, decoder.unit)
    decoder.advance(TOKENS, taps=taps)
    assert set(taps.values) == {"L00.ffn.act", "L01.k", "L01.v", "L01.attn.mix"}
    assert taps.stacked("L01.k").shape == (3, 2, 16)


@pytest.mark.parametrize("make", [SyncExecutor, AsyncExecutor])
def test_executors_look_alike(
    make: Callable[..., Executor], package_in: Callable[[str], Package]
) -> None:
    decoder = Decoder(package_in("F32"))
    program = apply(decoder.program)
    executor = make(program, decoder.unit, Trace(64))
    assert executor.program is program and executor.step == 0
    assert executor.parts == ("vector", *["matrix", "vector", *["matrix"] * 3] * 2, "control",
                              "matrix")  # fmt: skip
    executor.close()
    executor.close()


def test_shapes_of_buffers_are_told_before_anything_ran(
    package_in: Callable[[str], Package],
) -> None:
    package = package_in("Q4_1")
    decoder, taps = Decoder(package), Taps()
    decoder.advance(TOKENS, taps=taps)
    shapes = buffer_shapes(apply(decoder.program), package.tensors)
    caches = set(decoder.program.caches)
    assert shapes.keys() == taps.values.keys() - caches
    for name, shape in shapes.items():
        assert taps.stacked(name).shape == shape.of(3, 1), name
    assert shapes["head.logits"] == BufferShape("R", package.hyperparameters.vocab)
