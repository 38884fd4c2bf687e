"""Ops of a fused program, each alone on the reference's inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.decode import Decoder
from engine.measure.alignment import last_piece, local_run, single_steps
from engine.package import Package
from engine.program.passes import apply
from engine.runtime.trace import Taps

TOKENS = np.array([5, 90, 17, 17, 230, 64, 3])
ROWS = np.array([2, 4, 5, 6])


@pytest.mark.parametrize("prefill", [False, True])
def test_fused_ops_alone_write_what_the_reference_wrote(
    prefill: bool, package_in: Callable[[str], Package]
) -> None:
    package = package_in("Q4_1")
    exact, taps = Decoder(package, unit="reference", dtype=np.float64), Taps()
    for token in TOKENS:
        exact.advance(np.array([token]), taps=taps)
    caches = {name: np.array(cache[: len(TOKENS)]) for name, cache in exact.cache.buffers().items()}
    buffers = {name: taps.stacked(name)[ROWS] for name in taps.values if name not in caches}
    program = apply(exact.program)
    decoder = Decoder(package)
    piece = last_piece(ROWS)
    assert piece is not None
    found = local_run(
        program,
        decoder.unit,
        decoder.cache,
        TOKENS,
        ROWS,
        buffers,
        caches,
        pieces=[piece] if prefill else single_steps(ROWS),
    )
    assert found.disturbed == []
    assert found.buffers.keys() == {name for op in program.ops for name in op.writes}
    rows = ROWS[piece[0] :] if prefill else ROWS
    for name, values in found.buffers.items():
        wanted = taps.stacked(name)[rows]
        assert np.linalg.norm(values - wanted) <= 1e-5 * np.linalg.norm(wanted), name
