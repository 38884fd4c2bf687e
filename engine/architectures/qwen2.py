"""Qwen2 and Qwen2.5: a Llama whose q, k and v have biases.

Layers above `max_window_layers` may slide over a window (`use_sliding_window`); one shorter than
the context limits the context to it, whichever layers slide.
"""

from __future__ import annotations

from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout
from engine.architectures.reading import read_decoder
from engine.architectures.skeleton import decoder_program
from engine.architectures.traits import Traits
from engine.formats.checkpoint import Checkpoint
from engine.program.ops import Program

NAMES = ("qwen2",)
TRAITS = Traits(
    name="qwen2",
    gguf_neighbours=False,
    qkv_bias=True,
    config_defaults={
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
)


def read(checkpoint: Checkpoint) -> ModelLayout:
    """Raises FormatError naming the key or tensor that is missing, refused or out of range."""
    return read_decoder(checkpoint, TRAITS)


def program(hp: Hyperparameters) -> Program:
    return decoder_program(hp)
