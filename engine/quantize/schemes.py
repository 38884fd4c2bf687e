"""How weights lie in a package: the schemes, and their definition as float arrays.

A linear layer's weight is (N, K): N outputs, K inputs. Quantised schemes have groups of 32 inputs
and lie group-major, inputs before outputs, so that a step reads a group's 32 × N values in one
stream. Weight [n, 32 b + i] is:

- f32, f16, bf16: part `data` (N, K), as it is; bf16 is held as uint16
- q8: `q` int8 (K/32, 32, N) and `d` f16 (K/32, N); d q
- q4: `q` uint8 (K/32, 16, N) with input i in the low half of a byte and i + 16 in the high one,
  `d` and `m` f16 (K/32, N); d (q − zero) + m

A symmetric q4 tensor has no `m`, and its `zero` is 8. GGUF's Q4_0, Q4_1 and Q8_0 hold exactly these
numbers, so moving them here loses nothing. Source of the block layouts: the GGUF specification.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

GROUP = 32
# scheme → bits of a weight, scales included
BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8": 8.5, "q4": 5.0}


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """One tensor of a package; `parts` are views of the mapped file."""

    name: str
    scheme: str
    shape: tuple[int, ...]  # (N, K), or (N,) for norms and biases
    parts: Mapping[str, npt.NDArray[np.generic]]
    zero: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def dequantize(
    tensor: PackedTensor, rows: npt.NDArray[np.int64] | slice = slice(None)
) -> npt.NDArray[np.float32]:
    """The tensor, or some of its rows n, as float32 (rows, K): the definition of each scheme."""
    parts = tensor.parts
    if tensor.scheme in ("f32", "f16"):
        return parts["data"][rows].astype(np.float32)
    if tensor.scheme == "bf16":
        return widen_bf16(parts["data"][rows])
    scale = parts["d"][:, rows].astype(np.float32)  # (K/32, n)
    if tensor.scheme == "q8":
        values = parts["q"][:, :, rows].astype(np.float32)  # (K/32, 32, n)
    elif tensor.scheme == "q4":
        packed = parts["q"][:, :, rows].astype(np.uint8)
        values = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
        values -= tensor.zero
    else:
        raise ValueError(f"tensor {tensor.name}: unknown scheme {tensor.scheme!r}")
    values *= scale[:, None, :]
    if "m" in parts:
        values += parts["m"][:, rows].astype(np.float32)[:, None, :]
    inputs = tensor.shape[1]
    return np.ascontiguousarray(values.reshape(inputs, -1).T)


def widen_bf16(data: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """bf16 held as uint16 → float32, exactly."""
    wide = data.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
