"""The Llama family: Llama 2 and 3, SmolLM2, TinyLlama; in GGUF also Mistral, under this name.

A family module has the same skeleton as every other: `NAMES` (GGUF general.architecture and
config.json model_type), `read` (hyper-parameters and where each tensor of the package comes from)
and `program` (the ops of a decode step).
"""

from __future__ import annotations

from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout
from engine.architectures.reading import read_decoder
from engine.architectures.skeleton import decoder_program
from engine.architectures.traits import Traits
from engine.formats.checkpoint import Checkpoint
from engine.program.ops import Program

NAMES = ("llama",)
TRAITS = Traits(name="llama", gguf_neighbours=True, qkv_bias=None, output_bias=None)


def read(checkpoint: Checkpoint) -> ModelLayout:
    """Raises FormatError naming the key or tensor that is missing, refused or out of range."""
    return read_decoder(checkpoint, TRAITS)


def program(hp: Hyperparameters) -> Program:
    return decoder_program(hp)
