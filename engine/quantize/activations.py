"""Activations as int8: the definition of what a linear op with `activations="int8"` multiplies.

Per token and per group of 32 inputs, in float32 whatever the unit's own type:

    a = max |x|,  scale = a / 127,  q = rint(x · (127 / a)),  x̂ = q · scale

rint rounds half to even. A group whose 127 / a is not finite, because a is 0 or too small to
matter, has q = 0. A group that holds NaN or infinity has q = 0 and a scale that is not finite, so
that x̂ is NaN and the op's output shows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32  # inputs that share a scale


def quantise(x: npt.ArrayLike) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """x (T, K) → q int8 (T, K) and scale float32 (T, K/32).

    Raises ValueError when K is not a multiple of 32.
    """
    values = np.asarray(x, np.float32)
    tokens, inputs = values.shape
    if inputs % GROUP:
        raise ValueError(
            f"{inputs} inputs cannot be quantised in groups of {GROUP}: expected a multiple; keep "
            "the op's activations as floats"
        )
    grouped = values.reshape(tokens, -1, GROUP)  # (T, K/32, 32)
    largest = np.abs(grouped).max(axis=-1)  # (T, K/32), NaN where there is one
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / largest
        usable = np.isfinite(inverse) & np.isfinite(largest)
        products = np.rint(grouped * inverse[..., None])
    q = np.where(usable[..., None], products, np.float32(0)).astype(np.int8)
    return q.reshape(tokens, inputs), largest / np.float32(127)


def dequantise(
    q: npt.NDArray[np.int8], scale: npt.NDArray[np.float32], dtype: Any = np.float32
) -> npt.NDArray[Any]:
    """x̂ (T, K) = q · scale in `dtype`; exact in float64."""
    tokens = len(q)
    with np.errstate(invalid="ignore"):
        wide = q.reshape(tokens, -1, GROUP).astype(dtype) * scale.astype(dtype)[..., None]
    return np.asarray(wide.reshape(tokens, -1))
