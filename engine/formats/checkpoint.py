"""What every reader returns: hyper-parameters as metadata, and named, lazily mapped tensors.

Readers check headers, sizes, ranges and offsets first, and raise `FormatError` (a ValueError) that
names the field and its offset; nothing is allocated by a number read from a file before that number
was checked against the file's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class FormatError(ValueError):
    """A model file that cannot be read: names file, field and offset, and what was expected."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """`shape` is in numpy order: a linear layer's weight is (outputs, inputs)."""

    name: str
    shape: tuple[int, ...]
    type: str  # a ggml type name: F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q6_K, ...
    nbytes: int


class Checkpoint(Protocol):
    """An opened model file. Close it when done; arrays handed out keep their mapping alive."""

    path: Path
    format: str  # "gguf" | "safetensors" | "synthetic"
    metadata: Mapping[str, Any]  # GGUF keys as they stand; safetensors: the keys of config.json
    tensors: Mapping[str, TensorInfo]
    tokenizer: Mapping[str, Any] | None  # what engine.tokenizer.Tokenizer takes; JSON-able

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, mapped read-only: (rows, bytes per row)."""
        ...

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor dequantised to float32, in its `shape`. Allocates that much."""
        ...

    def close(self) -> None: ...
