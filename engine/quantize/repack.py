"""Tensors of a checkpoint → parts of a package, without loss where our layouts can hold them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from engine.formats.checkpoint import Checkpoint, FormatError
from engine.quantize.schemes import GROUP

Parts = dict[str, npt.NDArray[np.generic]]


@dataclasses.dataclass(frozen=True)
class Repacked:
    """`note` says what changed when the scheme cannot hold the numbers as they are."""

    scheme: str
    parts: Parts
    zero: int = 0
    note: str | None = None


def repack(
    checkpoint: Checkpoint, name: str, row_order: npt.NDArray[np.int64] | None = None
) -> Repacked:
    """Tensor `name` of the file in the layout of engine.quantize.schemes.

    `row_order` (N,) reorders its outputs. Raises FormatError for weights that are not finite or do
    not fit the scheme.
    """
    info = checkpoint.tensors[name]
    vector = len(info.shape) == 1
    if info.type in ("Q4_0", "Q4_1", "Q8_0") and not vector:
        raw = checkpoint.raw(name)
        return _blocks(checkpoint, name, raw if row_order is None else raw[row_order])
    if info.type in ("F16", "BF16") and not vector:
        bits = checkpoint.raw(name).view(np.uint16)
        bits = bits if row_order is None else bits[row_order]
        half = bits.view(np.float16) if info.type == "F16" else bits
        exponent = 0x7C00 if info.type == "F16" else 0x7F80
        _require_finite(checkpoint, name, (bits & exponent) != exponent)
        return Repacked(info.type.lower(), {"data": np.ascontiguousarray(half)})
    values = checkpoint.float32(name)
    values = values if row_order is None else values[row_order]
    _require_finite(checkpoint, name, np.isfinite(values))
    if info.type in ("F32", "F16", "BF16"):
        return Repacked("f32", {"data": np.ascontiguousarray(values)})
    return _rounded_to_half(checkpoint, name, values)


def _rounded_to_half(
    checkpoint: Checkpoint, name: str, values: npt.NDArray[np.float32]
) -> Repacked:
    """Block types without a layout of ours are kept as 16-bit floats, with the loss named."""
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


def _blocks(checkpoint: Checkpoint, name: str, raw: npt.NDArray[np.uint8]) -> Repacked:
    """raw (N, bytes per row) of Q4_0, Q4_1 or Q8_0 → group-major parts."""
    info = checkpoint.tensors[name]
    outputs, inputs = info.shape
    groups = inputs // GROUP
    header = 4 if info.type == "Q4_1" else 2
    blocks = raw.reshape(outputs, groups, -1)  # (N, K/32, bytes of a block)

    def half(start: int) -> npt.NDArray[np.float16]:
        found = np.ascontiguousarray(blocks[:, :, start : start + 2]).view(np.float16)
        _require_finite(checkpoint, name, np.isfinite(found))
        return np.ascontiguousarray(found[:, :, 0].T)  # (K/32, N)

    values = np.ascontiguousarray(blocks[:, :, header:].transpose(1, 2, 0))
    if info.type == "Q8_0":
        return Repacked("q8", {"q": values.view(np.int8), "d": half(0)})
    if info.type == "Q4_1":
        return Repacked("q4", {"q": values, "d": half(0), "m": half(2)})
    return Repacked("q4", {"q": values, "d": half(0)}, zero=8)


def _require_finite(checkpoint: Checkpoint, name: str, finite: npt.NDArray[np.bool_]) -> None:
    if finite.all():
        return
    first = tuple(int(i) for i in np.argwhere(~finite)[0])
    count = int(finite.size - np.count_nonzero(finite))
    raise FormatError(
        f"{checkpoint.path}: tensor {name!r} holds {count} values that are NaN or infinite, the "
        f"first at {first}; expected finite weights; convert the checkpoint again"
    )
