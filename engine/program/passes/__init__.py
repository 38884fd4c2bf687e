"""Passes rewrite a program. They are found by file name: adding one is adding a module here.

A pass is a module with `ORDER` (smaller runs first) and `run(program) -> program`, which returns
the program unchanged where there is nothing to do.
"""

from engine.program.passes.applying import apply, pass_names
from engine.program.passes.linears import (
    QUANTISED,
    int8_activations,
    layer_of,
    separate_dequantisation,
)

__all__ = [
    "QUANTISED",
    "apply",
    "int8_activations",
    "layer_of",
    "pass_names",
    "separate_dequantisation",
]
