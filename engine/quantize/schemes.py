"""How weights lie in a package: schemes, layouts, and their definition as float arrays.

A linear layer's weight is (N, K): N outputs, K inputs. A *scheme* says which numbers there are:

- f32, f16, bf16: part `data` (N, K), as it is; bf16 is held as uint16. Always layout `row`.
- q4: d (q − zero) + m, q of 4 bits; a symmetric tensor has no `m` and its `zero` is 8
- q8: d q + m, q int8; most have no `m`
- q4k, q5k, q6k: GGUF's K-quants as they are: d s q − dm n with q of 4 or 5 bits, d s (q − 32)
  with q of 6 bits; layout `interleaved` only, elsewhere they become q4 or q8 with the products
  d s and dm n as float32, which is exact

One `d` and `m` serve `group` inputs (32, 16, a multiple of 32, or all K); s, n and the d, dm of
K-quants serve 32 (q6k: 16) and 256.

A *layout* says where they lie:

- `row`: q4 `q` (N, K/32, 16) with input i in the low half of a byte and i + 16 in the high one;
  q8 `q` (N, K); `d`, `m` (N, K/group)
- `blocked`: inputs before outputs, so that a step reads a group's values of all outputs in one
  stream: q4 `q` (K/32, 16, N), q8 `q` (K/32, 32, N); `d`, `m` (K/group, N)
- `interleaved`: 16 outputs side by side for vector registers, R = ⌈N/16⌉. The 4-byte words of a
  row in layout `row` order; word c of 16 rows makes 64 bytes: `q` (R, stride), where the stride is
  padded so that rows of blocks do not lie a multiple of 4096 bytes apart; q5k `h` (R, K/32 · 64)
  and q6k `h` (R, K/32 · 128) the high bits; scales (R, K/group, 16). Outputs past N are zero.

The high bits, in 4-byte words j = 0..3 of 32 inputs: q5k has one word, bit 2c of byte j belongs to
input 4c + j and bit 2c + 1 to 16 + 4c + j; q6k has two, for c = 0, 1 and c = 2, 3, with two bits at
4 (c mod 2) for input 4c + j and two at 4 (c mod 2) + 2 for 16 + 4c + j.

GGUF's Q4_0, Q4_1, Q8_0 and K-quants hold exactly these numbers, so moving them loses nothing.
Source of the block layouts: the GGUF specification and `ggml-common.h`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.quantize.layouts import (
    ROWS,
    rows_of_blocked,
    rows_of_interleaved,
    rows_of_row,
)

GROUP = 32
SUPER = 256  # inputs of a K-quant's super-block
LAYOUTS = ("row", "blocked", "interleaved")
# scheme → bits of a weight, scales of groups of 32 included
BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8": 8.5,
    "q6k": 6.5625,
    "q5k": 5.5,
    "q4k": 4.5,
    "q4": 5.0,
}
FLOATS = ("f32", "f16", "bf16", "f64")
K_QUANTS = ("q4k", "q5k", "q6k")
# scheme → part → bytes of 32 inputs
PACKED: Mapping[str, Mapping[str, int]] = {
    "q4": {"q": 16},
    "q8": {"q": 32},
    "q4k": {"q": 16},
    "q5k": {"q": 16, "h": 4},
    "q6k": {"q": 16, "h": 8},
}
# scheme → part → inputs that one number serves; 0 stands for the tensor's group
SCALES: Mapping[str, Mapping[str, int]] = {
    "q4": {"d": 0, "m": 0},
    "q8": {"d": 0, "m": 0},
    "q4k": {"d": SUPER, "dm": SUPER, "s": 32, "n": 32},
    "q5k": {"d": SUPER, "dm": SUPER, "s": 32, "n": 32},
    "q6k": {"d": SUPER, "s": 16},
}
OPTIONAL = ("m",)
_FIXED_GROUP = {"q4k": 32, "q5k": 32, "q6k": 16}


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """One tensor of a package; `parts` are views of the mapped file."""

    name: str
    scheme: str
    shape: tuple[int, ...]  # (N, K), or (N,) for norms and biases
    parts: Mapping[str, npt.NDArray[np.generic]]
    zero: int = 0
    layout: str = "row"
    group: int = GROUP

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclasses.dataclass(frozen=True)
class PartForm:
    """What a part must look like."""

    shape: tuple[int, ...]
    dtypes: tuple[Any, ...]
    optional: bool = False


def part_forms(
    scheme: str, layout: str, shape: tuple[int, ...], group: int
) -> Mapping[str, PartForm]:
    """The parts of a tensor (N, K), or (N,), by name.

    Raises ValueError for a scheme, layout or group that does not exist or does not fit the shape.
    """
    if scheme in FLOATS:
        if layout != "row":
            raise ValueError(f"scheme {scheme} has layout 'row' only, found {layout!r}")
        dtypes = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "f64": np.float64}
        return {"data": PartForm(shape, (dtypes[scheme],))}
    if scheme not in PACKED:
        raise ValueError(f"unknown scheme {scheme!r}, known: {sorted((*FLOATS, *PACKED))}")
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}, known: {', '.join(LAYOUTS)}")
    multiple = SUPER if scheme in K_QUANTS else GROUP
    if len(shape) != 2 or shape[0] < 1 or shape[1] < 1 or shape[1] % multiple:
        raise ValueError(f"scheme {scheme} needs (N, K) with K a multiple of {multiple}: {shape}")
    _check_group(scheme, layout, shape[1], group)
    outputs, inputs = shape
    forms: dict[str, PartForm] = {}
    for part, width in PACKED[scheme].items():
        dtype = np.int8 if scheme == "q8" else np.uint8
        form: tuple[int, ...]
        if layout == "interleaved":
            length = inputs // GROUP * width * ROWS
            form = (-(-outputs // ROWS), padded(length) if part == "q" else length)
        elif layout == "blocked":
            form = (inputs // GROUP, width, outputs)
        else:
            form = (outputs, inputs) if scheme == "q8" else (outputs, inputs // GROUP, width)
        forms[part] = PartForm(form, (dtype,))
    for part, per in SCALES[scheme].items():
        count = inputs // (per or group)
        if layout == "interleaved":
            form = (-(-outputs // ROWS), count, ROWS)
        else:
            form = (count, outputs) if layout == "blocked" else (outputs, count)
        forms[part] = PartForm(form, _scale_dtypes(scheme, part), part in OPTIONAL)
    return forms


def _scale_dtypes(scheme: str, part: str) -> tuple[Any, ...]:
    if scheme not in K_QUANTS:
        return (np.float16, np.float32)
    if part in ("d", "dm"):
        return (np.float16,)
    return (np.int8,) if scheme == "q6k" else (np.uint8,)


def _check_group(scheme: str, layout: str, inputs: int, group: int) -> None:
    if scheme in K_QUANTS:
        if layout != "interleaved":
            raise ValueError(f"scheme {scheme} has layout 'interleaved' only, found {layout!r}")
        if group != _FIXED_GROUP[scheme]:
            raise ValueError(f"scheme {scheme} has groups of {_FIXED_GROUP[scheme]}, found {group}")
        return
    smallest = 16 if scheme == "q8" and layout != "interleaved" else GROUP
    if group < smallest or group % smallest or inputs % group:
        raise ValueError(
            f"scheme {scheme}, layout {layout}: groups of {group} inputs, expected a multiple of "
            f"{smallest} that divides {inputs}"
        )


def padded(length: int) -> int:
    """Bytes from one block of 16 rows to the next: streams a power of two apart share cache
    sets."""
    return length + 64 if length % 4096 == 0 else length


def dequantize(
    tensor: PackedTensor, rows: npt.NDArray[np.int64] | slice = slice(None)
) -> npt.NDArray[np.float32]:
    """The tensor, or some of its rows n, as float32 (rows, K): the definition of each scheme.

    Only the asked rows are read, whatever the layout.
    """
    if tensor.scheme in FLOATS:
        data = tensor.parts["data"][rows]
        return widen_bf16(data) if tensor.scheme == "bf16" else data.astype(np.float32)
    if tensor.scheme not in PACKED or tensor.layout not in LAYOUTS:
        raise ValueError(
            f"tensor {tensor.name}: unknown scheme {tensor.scheme!r} or layout {tensor.layout!r}"
        )
    outputs, inputs = tensor.shape
    if tensor.layout == "interleaved":
        parts = {
            part: rows_of_interleaved(array, rows, outputs, _words(tensor.scheme, part, inputs))
            for part, array in tensor.parts.items()
        }
    elif tensor.layout == "blocked":
        parts = {part: rows_of_blocked(array, rows) for part, array in tensor.parts.items()}
    else:
        parts = {part: rows_of_row(array, rows) for part, array in tensor.parts.items()}
    return decode_rows(tensor.scheme, parts, inputs, tensor.zero)


def _words(scheme: str, part: str, inputs: int) -> int | None:
    """4-byte words of a row of a packed part; None for scales."""
    width = PACKED[scheme].get(part)
    return None if width is None else inputs // GROUP * width // 4


def decode_rows(
    scheme: str, parts: Mapping[str, npt.NDArray[Any]], inputs: int, zero: int = 0
) -> npt.NDArray[np.float32]:
    """Parts in row order, flat: packed (n, bytes), scales (n, K/per) → float32 (n, K)."""
    values = integers_of_rows(scheme, parts, inputs).astype(np.float32)  # (n, K)
    offset = parts.get("m")
    if scheme in K_QUANTS:
        scale = products(parts["d"], parts["s"])
        if "dm" in parts:
            offset = -products(parts["dm"], parts["n"])
        zero = 32 if scheme == "q6k" else 0
    else:
        scale = parts["d"].astype(np.float32)
    if zero:
        values -= np.float32(zero)
    per = inputs // scale.shape[1]
    grouped = values.reshape(*scale.shape, per)
    grouped *= scale[:, :, None]
    if offset is not None:
        grouped += offset.astype(np.float32)[:, :, None]
    return values


def products(
    scale: npt.NDArray[np.floating[Any]], factors: npt.NDArray[np.generic]
) -> npt.NDArray[np.float32]:
    """(n, K/256) × (n, K/32 or K/16) → like the factors. Exact: 11 bits times at most 7."""
    wide = factors.astype(np.float32)
    by_super = wide.reshape(*scale.shape, factors.shape[1] // scale.shape[1])
    by_super *= scale.astype(np.float32)[:, :, None]
    return wide


def integers_of_rows(
    scheme: str, parts: Mapping[str, npt.NDArray[Any]], inputs: int
) -> npt.NDArray[np.int8] | npt.NDArray[np.uint8]:
    """The q of flat row-order parts: (n, K), int8 for q8, else uint8 counted from 0."""
    packed = parts["q"]
    if scheme == "q8":
        return packed.view(np.int8).reshape(-1, inputs)
    halves = packed.reshape(-1, inputs // GROUP, 1, 16)
    both = np.concatenate((halves & 15, halves >> 4), axis=2)  # (n, K/32, 2, 16)
    if scheme in ("q5k", "q6k"):
        both |= _high_bits(scheme, parts["h"], inputs).reshape(both.shape)
    return both.reshape(-1, inputs)


def _high_bits(scheme: str, packed: npt.NDArray[np.uint8], inputs: int) -> npt.NDArray[np.uint8]:
    """(n, bytes) of `h` → bits above the fourth, in place: (n, K/32, 2, 4 (c), 4 (j))."""
    words = packed.reshape(-1, inputs // GROUP, packed.shape[1] * GROUP // inputs // 4, 4)
    high = np.empty((len(words), inputs // GROUP, 2, 4, 4), np.uint8)
    for half in range(2):
        for c in range(4):
            if scheme == "q5k":
                high[:, :, half, c] = ((words[:, :, 0] >> (2 * c + half)) & 1) << 4
            else:
                shift = (c % 2) * 4 + half * 2
                high[:, :, half, c] = ((words[:, :, c // 2] >> shift) & 3) << 4
    return high


def widen_bf16(data: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """bf16 held as uint16 → float32, exactly."""
    wide = data.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
