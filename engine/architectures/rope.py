"""Inverse frequencies of the RoPE variants, computed once when a package is built.

Every variant here depends on the frequency alone, not on the position, so each is a vector of
inverse frequencies (D/2,) and one scale of the cosines and sines.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

KINDS = ("none", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Parameters of a rotation of `dimension` elements per head."""

    dimension: int
    theta: float
    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope scaling {self.kind!r} is not known; known: {', '.join(KINDS)}")
        if self.dimension < 2 or self.dimension % 2:
            raise ValueError(f"rope dimension is {self.dimension}, expected an even number")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"rope theta {self.theta} and factor {self.factor} must be above 0")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(f"rope scaling {self.kind!r} needs the original context length")

    @property
    def scale(self) -> float:
        """What cosines and sines are multiplied with."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def inverse_frequencies(
        self, divisors: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float64]:
        """(dimension/2,) radians per position.

        `divisors` (dimension/2,) is what some GGUF files carry as `rope_freqs.weight` in place of
        the llama3 parameters. Sources: Su et al. 2021 (RoFormer) for the base; Peng et al. 2023
        (YaRN), section 3; the Llama 3.1 model card's scaling rule.
        """
        exponent = np.arange(0, self.dimension, 2, dtype=np.float64) / self.dimension
        base = self.theta**-exponent  # (dimension/2,)
        if divisors is not None:
            if divisors.shape != base.shape:
                raise ValueError(f"rope divisors: shape {divisors.shape}, expected {base.shape}")
            return base / divisors.astype(np.float64)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._llama3(base)
        if self.kind == "yarn":
            return self._yarn(base)
        return base

    def _llama3(self, base: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        turns = self.original_context * base / (2 * math.pi)  # over the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * base / self.factor + smooth * base

    def _yarn(self, base: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        def dimension_at(turns: float) -> float:
            ratio = self.original_context / (turns * 2 * math.pi)
            return self.dimension * math.log(ratio) / (2 * math.log(self.theta))

        low = max(math.floor(dimension_at(self.beta_fast)), 0)
        high = min(math.ceil(dimension_at(self.beta_slow)), self.dimension - 1)
        span = max(high - low, 1e-3)
        ramp = np.clip((np.arange(self.dimension // 2) - low) / span, 0.0, 1.0)
        return ramp * base / self.factor + (1 - ramp) * base
