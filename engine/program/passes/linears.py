"""How linear ops compute: settings that leave the program's shape alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from engine.program.ops import FUSED, Op, Program

if TYPE_CHECKING:
    from engine.package import Package

QUANTISED = frozenset({"q4", "q8", "q4k", "q5k", "q6k"})  # schemes with integer weights


def int8_activations(program: Program, package: Package, off: Collection[str] = ()) -> Program:
    """Linear ops with integer weights take their input as int8, quantised per token and 32 inputs
    (engine.quantize.activations); others keep floats, and so do all ops of the layers in `off`.

    Raises ValueError for a name in `off` that is no layer with linear ops.
    """
    layers = list(dict.fromkeys(layer_of(op) for op in program.flat() if op.kind == "linear"))
    unknown = sorted(set(off) - set(layers))
    if unknown:
        raise ValueError(f"layer {unknown[0]!r} is not known; known: {', '.join(layers)}")

    def quantised(op: Op) -> bool:
        return layer_of(op) not in off and package.tensors[op.weights[0]].scheme in QUANTISED

    return _with(program, quantised, activations="int8")


def layer_of(op: Op) -> str:
    """`L07.ffn.down` → `L07`, `head.logits` → `head`."""
    return op.id.partition(".")[0]


def separate_dequantisation(program: Program) -> Program:
    """Linear ops dequantise their whole weight before they multiply, instead of inside: what is
    saved by not doing so can then be measured."""
    return _with(program, lambda op: True, dequantise="before")


def _with(program: Program, chosen: Callable[[Op], bool], **attributes: Any) -> Program:
    def changed(op: Op) -> Op:
        if op.kind == FUSED:
            parts = tuple(changed(part) for part in op.parts)
            return dataclasses.replace(op, attributes={**op.attributes, "parts": parts})
        if op.kind == "linear" and chosen(op):
            return dataclasses.replace(op, attributes={**op.attributes, **attributes})
        return op

    return dataclasses.replace(program, ops=tuple(changed(op) for op in program.ops))
