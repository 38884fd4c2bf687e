"""What is known of an op whose numbers went bad: the weights it reads, and their scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.architectures import family_named
from engine.package import Package
from engine.program.ops import Op
from engine.program.passes import apply

WEIGHTS = 4  # of an op that are told


def about_weights(package: Package, op_id: str) -> dict[str, Any]:
    """{name: words} for each weight of op `op_id`; {} for one that the model has not."""
    found: dict[str, Any] = {}
    for name in _weights(package, op_id)[:WEIGHTS]:
        tensor = package.tensors.get(name)
        if tensor is None:
            continue
        words = f"{tensor.scheme} {'x'.join(map(str, tensor.shape))}"
        for part in ("d", "data"):
            values = tensor.parts.get(part)
            if values is not None and np.issubdtype(values.dtype, np.floating):
                whole = np.asarray(values, np.float64)
                finite = whole[np.isfinite(whole)]
                bad = int(whole.size - finite.size)
                largest = float(np.abs(finite).max()) if finite.size else 0.0
                named = "scale" if part == "d" else "value"
                words += f", largest {named} {largest:.6g}" + (f", {bad} not finite" if bad else "")
                break
        found[f"weight {name}"] = words
    return found


def _weights(package: Package, op_id: str) -> list[str]:
    hp = package.hyperparameters
    plain = family_named(hp.architecture).program(hp)
    for program in (apply(plain), plain):
        for op in program.ops:
            inner: Op | None = op.inner(op_id)
            if inner is not None:
                parts = inner.parts or (inner,)
                return [name for part in parts for name in part.weights]
    return []
