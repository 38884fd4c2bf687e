"""How linear ops compute: settings that leave the program's shape alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.program.ops import FUSED, Op, Program

if TYPE_CHECKING:
    from engine.package import Package

QUANTISED = frozenset({"q4", "q8", "q4k", "q5k", "q6k"})  # schemes with integer weights


def int8_activations(program: Program, package: Package) -> Program:
    """Linear ops with integer weights take their input as int8, quantised per token and 32 inputs
    (engine.quantize.activations); others keep floats."""

    def quantised(op: Op) -> bool:
        return package.tensors[op.weights[0]].scheme in QUANTISED

    return _with(program, quantised, activations="int8")


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
