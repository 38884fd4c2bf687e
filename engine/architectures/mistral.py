"""Mistral: a Llama without biases whose attention may slide over a window.

A window shorter than the context limits the context to it: up to there the results are exact.
GGUF files of these models call themselves llama.
"""

from __future__ import annotations

from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout
from engine.architectures.reading import read_decoder
from engine.architectures.skeleton import decoder_program
from engine.architectures.traits import Traits
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.program.ops import Program

NAMES = ("mistral",)
TRAITS = Traits(
    name="mistral",
    gguf_neighbours=True,
    config_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


def read(checkpoint: Checkpoint) -> ModelLayout:
    """Raises FormatError naming the key or tensor that is missing, refused or out of range."""
    if checkpoint.format != "safetensors":
        raise FormatError(
            f"{checkpoint.path}: general.architecture is 'mistral', expected 'llama': converters "
            "write Mistral models under that name, so the order of this file's q and k rows is "
            "not known; convert the model again"
        )
    return read_decoder(checkpoint, TRAITS)


def program(hp: Hyperparameters) -> Program:
    return decoder_program(hp)
