"""Tensors of a checkpoint → parts of a package, without loss where our schemes can hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.checkpoint import Checkpoint, FormatError
from engine.quantize.ggml import BLOCKS, Quantised, read_blocks
from engine.quantize.layouts import blocked, interleaved
from engine.quantize.schemes import (
    GROUP,
    K_QUANTS,
    PACKED,
    integers_of_rows,
    part_forms,
    products,
)

Parts = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Repacked:
    """`note` says what changed when the scheme cannot hold the numbers as they are."""

    scheme: str
    parts: Parts
    zero: int = 0
    note: str | None = None
    layout: str = "row"
    group: int = GROUP


def repack(
    checkpoint: Checkpoint,
    name: str,
    row_order: npt.NDArray[np.int64] | None = None,
    layout: str = "blocked",
) -> Repacked:
    """Tensor `name` of the file in a layout of engine.quantize.schemes.

    `row_order` (N,) reorders its outputs. Raises FormatError for weights that are not finite or do
    not fit the scheme.
    """
    info = checkpoint.tensors[name]
    vector = len(info.shape) == 1
    if info.type in BLOCKS and not vector:
        raw = checkpoint.raw(name)
        raw = raw if row_order is None else raw[row_order]
        tensor = read_blocks(info.type, raw, info.shape[1])
        for part, array in tensor.parts.items():
            if array.dtype.kind == "f":
                require_finite(checkpoint, name, np.isfinite(array), f"{part} of block")
        return lay_out(tensor, layout)
    if info.type in ("F16", "BF16") and not vector:
        bits = checkpoint.raw(name).view(np.uint16)
        bits = bits if row_order is None else bits[row_order]
        half = bits.view(np.float16) if info.type == "F16" else bits
        exponent = 0x7C00 if info.type == "F16" else 0x7F80
        require_finite(checkpoint, name, (bits & exponent) != exponent)
        return Repacked(info.type.lower(), {"data": np.ascontiguousarray(half)})
    values = checkpoint.float32(name)
    values = values if row_order is None else values[row_order]
    require_finite(checkpoint, name, np.isfinite(values))
    if info.type in ("F32", "F16", "BF16"):
        return Repacked("f32", {"data": np.ascontiguousarray(values)})
    return _rounded_to_half(checkpoint, name, values)


def lay_out(tensor: Quantised, layout: str) -> Repacked:
    """Row order → a layout; outside `interleaved`, K-quants become q4 or q8 without loss."""
    if tensor.scheme in K_QUANTS and layout != "interleaved":
        tensor = _with_products(tensor)
    forms = part_forms(tensor.scheme, layout, tensor.shape, tensor.group)
    parts: dict[str, npt.NDArray[Any]] = {}
    for part, array in tensor.parts.items():
        width = PACKED[tensor.scheme].get(part)
        if layout == "interleaved":
            # Outputs past N have the value 0: the zero point in both halves of a byte.
            fill = 0 if width is None else 0x11 * tensor.zero
            stride = None if width is None else forms[part].shape[1]
            parts[part] = interleaved(array, width is not None, stride, fill)
        elif layout == "blocked":
            parts[part] = blocked(array, width)
        else:
            parts[part] = np.ascontiguousarray(array).reshape(forms[part].shape)
    return Repacked(tensor.scheme, parts, tensor.zero, None, layout, tensor.group)


def _with_products(tensor: Quantised) -> Quantised:
    """A K-quant as q4 or q8 with its products of scales as float32; both are exact."""
    old, inputs = tensor.parts, tensor.shape[1]
    new: dict[str, npt.NDArray[Any]] = {"d": products(old["d"], old["s"])}
    if "dm" in old:
        new["m"] = -products(old["dm"], old["n"])
    if tensor.scheme == "q4k":
        return Quantised("q4", tensor.shape, {"q": old["q"], **new}, 0, tensor.group)
    # Five and six bits fit into int8; in pieces of rows, for integers_of_rows makes copies.
    q = np.empty(tensor.shape, np.int8)
    step = max(1, (1 << 22) // inputs)
    for start in range(0, len(q), step):
        piece = {part: old[part][start : start + step] for part in ("q", "h")}
        q[start : start + step] = integers_of_rows(tensor.scheme, piece, inputs).view(np.int8)
    if tensor.scheme == "q6k":
        q -= np.int8(32)
    return Quantised("q8", tensor.shape, {"q": q, **new}, 0, tensor.group)


def _rounded_to_half(
    checkpoint: Checkpoint, name: str, values: npt.NDArray[np.float32]
) -> Repacked:
    """Block types without a scheme of ours are kept as 16-bit floats, with the loss named."""
    kind = checkpoint.tensors[name].type
    limit = float(np.finfo(np.float16).max)
    if values.size and float(np.abs(values).max()) > limit:
        return Repacked("f32", {"data": values}, note=f"{name}: {kind} kept as f32 (range)")
    half = values.astype(np.float16)
    power = float(np.square(values, dtype=np.float64).sum())
    loss = float(np.square(half.astype(np.float64) - values).sum())
    relative = (loss / power) ** 0.5 if power else 0.0
    note = f"{name}: {kind} dequantised to f16, relative error {relative:.1e}"
    return Repacked("f16", {"data": half}, note=note)


def require_finite(
    checkpoint: Checkpoint, name: str, finite: npt.NDArray[np.bool_], what: str = "value"
) -> None:
    """Raises FormatError with the number and the first place of what is not finite."""
    if finite.all():
        return
    first = tuple(int(i) for i in np.argwhere(~finite)[0])
    count = int(finite.size - np.count_nonzero(finite))
    raise FormatError(
        f"{checkpoint.path}: tensor {name!r} holds {count} {what}s that are NaN or infinite, the "
        f"first at {first}; expected finite weights; convert the checkpoint again"
    )
