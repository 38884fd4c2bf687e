"""What sets a model family apart from the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.architectures.tensors import OUTPUT_BIAS, QK_NORM, QKV_BIAS


@dataclasses.dataclass(frozen=True)
class Traits:
    """A family module's choices among what the shared skeleton can do.

    `gguf_neighbours`: its GGUF files hold the rows of q and k so that RoPE rotates neighbours, and
    may carry RoPE divisors (llama.cpp: "norm" against "neox" rotation). `config_defaults`: values
    of config.json's keys where the key is absent, as Transformers' config class of the family has
    them. `refused`: keys of config.json whose other values would change the result, with what they
    stand for.
    """

    name: str
    gguf_neighbours: bool
    qkv_bias: bool | None = False  # None: as the tensors say
    output_bias: bool | None = False
    qk_norm: bool = False
    config_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, tuple[tuple[object, ...], str]] = dataclasses.field(default_factory=dict)

    @property
    def required(self) -> tuple[str, ...]:
        """Parts that every checkpoint of the family has beside those of every decoder."""
        return (
            *(QKV_BIAS if self.qkv_bias else ()),
            *(OUTPUT_BIAS if self.output_bias else ()),
            *(QK_NORM if self.qk_norm else ()),
        )

    @property
    def optional(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parts that a checkpoint has or has not."""
        return (
            *((QKV_BIAS,) if self.qkv_bias is None else ()),
            *((OUTPUT_BIAS,) if self.output_bias is None else ()),
        )
