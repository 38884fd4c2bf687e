"""What ops read and write: named buffers, and the KV cache that lives across steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Arrays of a step by name: float activations, or int64 for tokens, positions and rows.
Buffer = npt.NDArray[Any]
State = dict[str, Buffer]


class ContextFull(ValueError):
    """The next tokens have no slot left. Carries how many fit."""

    def __init__(self, position: int, tokens: int, context: int) -> None:
        self.position, self.tokens, self.context = position, tokens, context
        super().__init__(
            f"{tokens} tokens at position {position} exceed the context of {context}; "
            f"{context - position} still fit"
        )


class KVCache:
    """Keys and values of all layers in one block that is allocated once.

    Position p lies in slot p; an update writes its slots and nothing else moves. The block is
    zero-initialised by the kernel page by page, so memory grows with the positions that were
    written, not with the context that was asked for.
    """

    def __init__(self, layers: int, context: int, kv_heads: int, head_dim: int, dtype: Any) -> None:
        shape = (layers, 2, context, kv_heads, head_dim)
        self.block: npt.NDArray[np.floating] = np.zeros(shape, dtype)  # (L, 2, S, K, D)
        self.context = context

    def buffers(self) -> State:
        """`L00.k`, `L00.v`, …: views (S, K, D) of the block."""
        return {
            f"L{layer:02d}.{part}": self.block[layer, index]
            for layer in range(self.block.shape[0])
            for index, part in enumerate("kv")
        }

    @property
    def bytes_per_position(self) -> int:
        return self.block.nbytes // self.context
