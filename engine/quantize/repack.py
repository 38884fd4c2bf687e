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
    """`note` says why a tensor has another scheme than asked, or lost precision."""

    scheme: str
    parts: Parts
    zero: int = 0
    note: str | None = None
    layout: str = "row"
    group: int = GROUP
    error: float | None = None  # relative, where the numbers were quantised here


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
    if len(info.shape) > 1 and info.type in BLOCKS:
        tensor = read_blocks(info.type, _ordered(checkpoint.raw(name), row_order), info.shape[1])
        for part, array in tensor.parts.items():
            if array.dtype.kind == "f":
                what = "scale" if part == "d" else "minimum"
                require_finite(checkpoint, name, np.isfinite(array), what, row_order)
        return lay_out(tensor, layout)
    if len(info.shape) > 1 and info.type in ("F16", "BF16"):
        bits = _ordered(checkpoint.raw(name).view(np.uint16), row_order)
        exponent = 0x7C00 if info.type == "F16" else 0x7F80
        require_finite(checkpoint, name, (bits & exponent) != exponent, rows=row_order)
        half = bits.view(np.float16) if info.type == "F16" else bits
        return Repacked(info.type.lower(), {"data": np.ascontiguousarray(half)})
    if info.type not in ("F32", "F16", "BF16"):
        return to_half(checkpoint, name, row_order, f"{info.type} dequantised to f16")
    values = _ordered(checkpoint.float32(name), row_order)
    require_finite(checkpoint, name, np.isfinite(values), rows=row_order)
    return Repacked("f32", {"data": np.ascontiguousarray(values)})


def _ordered(array: npt.NDArray[Any], order: npt.NDArray[np.int64] | None) -> npt.NDArray[Any]:
    return array if order is None else array[order]


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


def to_half(
    checkpoint: Checkpoint, name: str, row_order: npt.NDArray[np.int64] | None, reason: str
) -> Repacked:
    """Tensor `name` as 16-bit floats, or 32-bit ones beyond their range; the loss is noted."""
    values = _ordered(checkpoint.float32(name), row_order)
    require_finite(checkpoint, name, np.isfinite(values), rows=row_order)
    if float(np.abs(values).max()) > float(np.finfo(np.float16).max):
        kind = checkpoint.tensors[name].type
        return Repacked("f32", {"data": values}, note=f"{kind} kept as f32 (range)")
    half = values.astype(np.float16)
    power = float(np.square(values, dtype=np.float64).sum())
    loss = float(np.square(half.astype(np.float64) - values).sum())
    relative = (loss / power) ** 0.5 if power else 0.0
    return Repacked("f16", {"data": half}, note=f"{reason}, relative error {relative:.1e}")


def require_finite(
    checkpoint: Checkpoint,
    name: str,
    finite: npt.NDArray[np.bool_],
    what: str = "value",
    rows: npt.NDArray[np.int64] | None = None,
) -> None:
    """Raises FormatError with the number and the first place of what is not finite.

    `rows` (n,) are the file's rows where they lie in another order here.
    """
    if finite.all():
        return
    first = [int(i) for i in np.argwhere(~finite)[0]]
    if rows is not None:
        first[0] = int(rows[first[0]])
    place = f"({', '.join(map(str, first))})"
    if what != "value":
        place = f"row {first[0]}, block {first[1]}"
    count = int(finite.size - np.count_nonzero(finite))
    verb = "is" if count == 1 else "are"
    plural = {"minimum": "minima"}.get(what, f"{what}s")
    raise FormatError(
        f"{checkpoint.path}: tensor {name!r} holds {count} {what if count == 1 else plural} that "
        f"{verb} NaN or infinite, the first at {place}; expected finite weights; convert the "
        "checkpoint again"
    )
