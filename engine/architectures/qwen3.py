"""Qwen3, dense: each head of q and k is normalised before RoPE; no biases, its own head size.

The mixture-of-experts models have names of their own (qwen3moe, qwen3_moe), which are not known.
"""

from __future__ import annotations

from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout
from engine.architectures.reading import read_decoder
from engine.architectures.skeleton import decoder_program
from engine.architectures.traits import Traits
from engine.formats.checkpoint import Checkpoint
from engine.program.ops import Program

NAMES = ("qwen3",)
TRAITS = Traits(
    name="qwen3",
    gguf_neighbours=False,
    qk_norm=True,
    config_defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    refused={"attention_bias": ((False,), "biases of the attention")},
)


def read(checkpoint: Checkpoint) -> ModelLayout:
    """Raises FormatError naming the key or tensor that is missing, refused or out of range."""
    return read_decoder(checkpoint, TRAITS)


def program(hp: Hyperparameters) -> Program:
    return decoder_program(hp)
