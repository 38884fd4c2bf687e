"""Attention scores beyond what 16-bit floats hold, as models with large biases of q and k give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint
from engine.native.library import NativeUnavailable
from engine.options import EngineOptions
from engine.package import Package, build_package
from engine.runtime.trace import Taps
from engine.units import unit_names

TOKENS = np.array([(5 + 29 * index) % 253 for index in range(40)])
HEAD_DIM = 64
BIAS = 45.0  # 64 · 45² is about 1.3e5; the largest 16-bit float is 65504


class LargeBiases(SyntheticCheckpoint):
    """A qwen2 model whose queries and keys all point the same way, far out."""

    def __init__(self) -> None:
        super().__init__(11, family="qwen2", heads=2, kv_heads=1, head_dim=HEAD_DIM, context=64)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        found = super().float32(name)
        return found + np.float32(BIAS) if name.endswith(("q.bias", "k.bias")) else found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("large") / "large.package"
    build_package(LargeBiases(), path, name="large")
    return Package.open(path)


@pytest.fixture(scope="module")
def exact(package: Package) -> tuple[npt.NDArray[np.floating], Taps]:
    taps = Taps()
    decoder = Decoder(package, unit="reference", dtype=np.float64)
    return decoder.advance(TOKENS, all_logits=True, taps=taps), taps


def test_the_model_has_scores_beyond_sixteen_bits(
    exact: tuple[npt.NDArray[np.floating], Taps],
) -> None:
    """Otherwise the tests below would show nothing."""
    _, taps = exact
    for layer in ("L00", "L01"):
        q = taps.stacked(f"{layer}.attn.q_rope").reshape(len(TOKENS), 2, HEAD_DIM)
        k = taps.stacked(f"{layer}.attn.k_rope")
        dots = np.einsum("thd,sd->hts", q, k)
        assert dots.max() > 1e5
        with np.errstate(over="ignore"):
            assert np.isinf(dots.astype(np.float16)).any()


WAYS = {
    **{unit: EngineOptions(unit=unit) for unit in unit_names()},  # with floats throughout
    "native, float16 cache": EngineOptions.for_unit("native"),
    "native, int8 cache": EngineOptions.from_mapping({"unit": "native", "kv": "int8"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_dot_of_a_hundred_thousand_stays_finite_and_right(
    way: str, package: Package, exact: tuple[npt.NDArray[np.floating], Taps]
) -> None:
    wanted, _ = exact
    try:
        batch, steps = (Decoder(package, options=WAYS[way]) for _ in range(2))
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    found = batch.advance(TOKENS, all_logits=True)
    one_by_one = np.array([steps.advance(TOKENS[at : at + 1]) for at in range(len(TOKENS))])
    for logits in (found, one_by_one):
        assert np.isfinite(logits).all()
        # A token's own key wins by more than rounding, so that units of lower precision agree too.
        assert np.linalg.norm(logits - wanted) < 2e-2 * np.linalg.norm(wanted)
