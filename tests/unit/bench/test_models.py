"""The recipes of the measured models: valid files with sane numbers, the same every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decode import Decoder
from engine.formats import open_checkpoint
from engine.formats.blocks import dequantise
from engine.formats.gguf_writer import write_gguf
from engine.package import Package, build_package
from tests.bench.blocks import KINDS, random_rows
from tests.bench.models import BILLION, NAMES, TINY, RandomBlocks, prepare, q4_k_m


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("deviation", [1.0, 0.011])
def test_random_blocks_have_the_deviation_asked_for_and_no_mean(
    kind: str, deviation: float
) -> None:
    values = dequantise(random_rows(kind, (512, 1024), deviation, "s"), kind, 1024)
    assert np.isfinite(values).all()
    assert float(values.std()) == pytest.approx(deviation, rel=0.03)
    assert abs(float(values.mean())) < deviation / 50
    # Neither outputs nor inputs stand out.
    assert float(np.abs(values.mean(axis=1)).max()) < deviation / 3


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_random_blocks_are_whole_rows_and_the_same_for_a_seed(
    kind: str, rows: int, blocks: int, seed: int
) -> None:
    inputs = KINDS[kind][0] * blocks
    first = random_rows(kind, (rows, inputs), 0.1, str(seed))
    assert dequantise(first, kind, inputs).shape == (rows, inputs)
    assert (random_rows(kind, (rows, inputs), 0.1, str(seed)) == first).all()
    assert (random_rows(kind, (rows, inputs), 0.1, f"{seed} other") != first).any()


def test_a_row_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K has blocks of 256 values, 288"):
        random_rows("Q4_K", (4, 288), 1.0, "s")


def test_the_k_quant_mix_has_more_bits_for_half_of_value_and_down_projections() -> None:
    layers = BILLION.layers
    for part in ("attn_v", "ffn_down"):
        kinds = [q4_k_m(f"blk.{layer}.{part}.weight", layers) for layer in range(layers)]
        assert kinds.count("Q6_K") == layers // 2
        assert kinds[0] == kinds[-1] == "Q6_K"
    assert q4_k_m("output.weight", layers) == "Q6_K"
    assert q4_k_m("blk.0.attn_q.weight", layers) == q4_k_m("token_embd.weight", layers) == "Q4_K"


def test_the_large_shape_has_a_billion_parameters_and_half_a_gigabyte_in_four_bits() -> None:
    tensors = RandomBlocks(BILLION, "Q4_0").tensors
    read = [info for info in tensors.values() if info.name != "token_embd.weight"]
    assert sum(np.prod(info.shape) for info in tensors.values()) == pytest.approx(1.1e9, rel=0.02)
    assert sum(info.nbytes for info in read) == pytest.approx(0.585e9, rel=0.02)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q8_0"])
def test_a_random_model_is_a_readable_file_whose_logits_are_sane(kind: str, tmp_path: Path) -> None:
    model = RandomBlocks(TINY, kind)
    for name, info in model.tensors.items():
        assert model.raw(name).nbytes == info.nbytes
    write_gguf(model, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    build_package(checkpoint, tmp_path / "m.package", name="m")
    with Package.open(tmp_path / "m.package") as package:
        logits = Decoder(package, context=64).advance(np.arange(40), all_logits=True)
    checkpoint.close()
    assert 1.0 < float(logits.std()) < 10.0


def test_a_model_is_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare("tiny-q4_0", tmp_path, said.append)
    stamp = first.path.stat().st_mtime_ns
    again = prepare("tiny-q4_0", tmp_path, said.append)
    assert said == ["writing model tiny-q4_0"]
    assert (again, again.path.stat().st_mtime_ns) == (first, stamp)
    assert len(first.tokens) == first.context == TINY.context
    assert max(first.tokens) < TINY.vocab


def test_an_unknown_model_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=NAMES[0]):
        prepare("7b", tmp_path, print)
