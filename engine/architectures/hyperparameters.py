"""Hyper-parameters of a decoder, the same whatever file they came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """One decoder-only transformer. Letters as in docs/architecture.md.

    `rope_scale` multiplies cosines and sines (YaRN's attention factor; 1 elsewhere). The rotation's
    inverse frequencies (D/2,) are the package tensor `rope.inv_freq`, so that every RoPE variant is
    the same op.
    """

    architecture: str
    vocab: int  # V
    width: int  # M
    layers: int
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    ffn: int  # F
    context: int  # S at most
    rms_eps: float
    rope: str  # "none", "linear", "llama3" or "yarn": for people; the numbers are in the tensor
    rope_scale: float
    tied: bool  # the head reads the embedding's weights
    qkv_bias: bool  # q, k and v have a bias
    output_bias: bool  # the attention's output has a bias
    qk_norm: bool  # each head of q and k is normalised (RMS over D) before RoPE

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Hyperparameters:
        """Raises ValueError naming a field that is missing, unknown or out of range."""
        fields = {field.name for field in dataclasses.fields(Hyperparameters)}
        unknown, missing = sorted(set(raw) - fields), sorted(fields - set(raw))
        if unknown or missing:
            raise ValueError(f"hyper-parameters: unknown {unknown}, missing {missing}")
        result = Hyperparameters(**raw)
        problem = result.problem()
        if problem:
            raise ValueError(f"hyper-parameters: {problem}")
        return result

    def problem(self) -> str | None:
        """What makes these impossible, in words, or None."""
        for name in (
            "vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "context",
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 2**31:
                return f"{name} is {value!r}, expected a positive whole number"
        for name in ("tied", "qkv_bias", "output_bias", "qk_norm"):
            if type(getattr(self, name)) is not bool:
                return f"{name} is {getattr(self, name)!r}, expected true or false"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads do not divide by {self.kv_heads} key/value heads"
        if self.head_dim % 2:
            return f"head dimension {self.head_dim} is odd; RoPE rotates pairs"
        if not 0 <= self.rms_eps < 1:
            return f"rms_eps is {self.rms_eps!r}, expected a small number"
        return None
