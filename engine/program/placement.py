"""Which part of a board an op runs on: control, vector or matrix.

- control: the CPU, for token logic
- vector: norms, softmax, rotation, element-wise work
- matrix: matrix-vector and matrix-matrix products

The table is data, and a board may override it. Softmax and norms stay in full precision on the
vector part unless a board says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.program.ops import KINDS, Op

PARTS = ("control", "vector", "matrix")
Placement = Mapping[str, str]  # op kind → part

DEFAULT: Placement = MappingProxyType(
    {
        "embed": "vector",
        "rmsnorm": "vector",
        "linear": "matrix",
        "rope": "vector",
        "kv_append": "vector",
        "attention": "vector",
        "swiglu": "vector",
        "add": "vector",
        "select": "control",
    }
)


def placement(overrides: Mapping[str, str] | None = None) -> Placement:
    """The default table with a board's `overrides`.

    Raises ValueError naming a kind or a part that is not known.
    """
    chosen = dict(DEFAULT)
    for kind, part in (overrides or {}).items():
        if kind not in KINDS:
            hint = "; a fused op goes where its parts go" if kind == "fused" else ""
            raise ValueError(
                f"placement: op kind {kind!r} is not known, expected one of {', '.join(KINDS)}"
                f"{hint}"
            )
        if part not in PARTS:
            raise ValueError(
                f"placement of {kind}: part {part!r} is not known, expected one of "
                f"{', '.join(PARTS)}"
            )
        chosen[kind] = part
    return MappingProxyType(chosen)


def part_of(op: Op, table: Placement = DEFAULT) -> str:
    """Where an op runs; a fused one where its last linear or attention part does, else where its
    last part does."""
    heavy = [part for part in op.parts if part.kind in ("linear", "attention")]
    return table[(heavy or list(op.parts))[-1].kind]
