"""The KV cache: one block allocated once, in several precisions and two memory layouts.

S slots per sequence, B sequences; an update writes its slots and nothing else moves. What a part
(keys or values of one layer) looks like in memory, C-contiguous:

    layout  f32, f16, int8 elements      int4 bytes, two codes each
    numpy   (B·S, K, D), f32 alone       –
    sd      (B, K, S, D)                 (B, K, S, D/2): low nibble d = i, high d = i + D/2
    ds      (B, K, S/32, D, 32)          (B, K, S/32, D, 16): low nibble slot j, high slot j + 16
    mixed   keys as ds, values as sd: what attention reads of each runs along the vectors

int8 and int4 have a scale in float16 (B, K, S) for each slot and head: the largest magnitude of the
head's D values over 127 or 7, rounded to float16; code = round to even of value / scale, clipped to
±127 or ±7 (int4 codes are stored plus 8). A scale of 0 means codes of 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, cast

import numpy as np
import numpy.typing as npt

from engine.program.ops import Op, Program
from engine.runtime.state import Buffer, CacheOverflow, State

if TYPE_CHECKING:
    from engine.architectures import Hyperparameters

SCHEMES = ("f32", "f16", "int8", "int4")
LAYOUTS = ("numpy", "sd", "ds", "mixed")
PANEL = 32  # slots that lie side by side in the layout ds
PARTS = ("k", "v")
ALIGNMENT = 64  # bytes: a cache line, and the widest vector
F16_MAX = 65504.0
_LEVELS = {"int8": 127, "int4": 7}

Scales = Optional[npt.NDArray[np.float16]]


def range_limit(scheme: str) -> float:
    """The largest magnitude that a scheme holds without becoming infinite."""
    return np.inf if scheme == "f32" else F16_MAX * _LEVELS.get(scheme, 1)


def encode(values: npt.NDArray[Any], scheme: str) -> tuple[Buffer, Scales]:
    """Codes (n, K, D) and scales (n, K) of float values (n, K, D).

    float16 elements are their own codes. Values within `range_limit` are the caller's duty.
    """
    if scheme == "f32":
        return values, None
    floats = values.astype(np.float32)
    if scheme == "f16":
        return floats.astype(np.float16), None
    levels = _LEVELS[scheme]
    scale = (np.abs(floats).max(axis=-1) / np.float32(levels)).astype(np.float16)  # (n, K)
    divisor = scale.astype(np.float32)[..., None]
    # Magnitudes that round to no scale at all are as good as zero.
    codes = np.rint(np.divide(floats, divisor, out=np.zeros_like(floats), where=divisor > 0))
    return np.clip(codes, -levels, levels).astype(np.int8), scale


def decode(codes: Buffer, scale: Scales, dtype: Any) -> Buffer:
    """Floats (n, K, D): the codes times their scales."""
    wide = codes.astype(dtype, copy=False)
    return wide if scale is None else wide * scale.astype(dtype)[..., None]


class CacheView:
    """One part of one layer, (B·S, K, D): reads as floats, takes writes by slot, as arrays do.

    Indices are those of the first axis: a number, a slice, or an array of slots of any shape.
    """

    def __init__(
        self, data: Buffer, scale: Scales, *, scheme: str, layout: str, dtype: Any, head_dim: int
    ) -> None:
        self.data, self.scale, self.scheme, self.layout = data, scale, scheme, layout
        self.dtype = np.dtype(dtype)
        sequences, kv_heads = data.shape[:2]
        self.slots = data.shape[2] * (PANEL if layout == "ds" else 1)  # S
        self.shape = (sequences * self.slots, kv_heads, head_dim)
        self.ndim, self.nbytes = 3, data.nbytes + (0 if scale is None else scale.nbytes)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Buffer:
        if isinstance(index, slice):
            within = self._within_a_sequence(index)
            if within is not None:
                return self._read_range(*within)
        slots = np.arange(len(self))[index]
        flat = slots.reshape(-1)
        floats = decode(self._take(flat), self._scales(flat), self.dtype)
        return floats.reshape(*slots.shape, *self.shape[1:])

    def __setitem__(self, index: Any, values: npt.ArrayLike) -> None:
        slots = np.arange(len(self))[index]
        shape = (*slots.shape, *self.shape[1:])
        floats = np.broadcast_to(np.asarray(values, self.dtype), shape)
        flat = slots.reshape(-1)
        codes, scale = encode(floats.reshape(flat.size, *self.shape[1:]), self.scheme)
        sequence, slot = np.divmod(flat, self.slots)
        self._put(sequence, slot, codes)
        if self.scale is not None and scale is not None:
            self.scale[sequence, :, slot] = scale

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Buffer:
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)

    def copy(self) -> Buffer:
        """All slots as floats."""
        return self[:]

    def _within_a_sequence(self, index: slice) -> tuple[int, int, int] | None:
        """(sequence, first slot, slot behind the last) of a slice that leaves no sequence."""
        start, stop, step = index.indices(len(self))
        if step != 1 or stop <= start or start // self.slots != (stop - 1) // self.slots:
            return None
        sequence, first = divmod(start, self.slots)
        return sequence, first, first + stop - start

    def _read_range(self, sequence: int, first: int, behind: int) -> Buffer:
        """Consecutive slots of one sequence without an index for each: (n, K, D)."""
        span = slice(first, behind)
        if self.layout == "sd":
            codes = self._nibbles(self.data[sequence, :, span], axis=-1).transpose(1, 0, 2)
        else:
            low, high = first // PANEL, -(-behind // PANEL)
            panels = self._nibbles(self.data[sequence, :, low:high], axis=-1)  # (K, p, D, 32)
            by_slot = panels.transpose(1, 3, 0, 2).reshape(-1, *self.shape[1:])
            codes = by_slot[first - low * PANEL : behind - low * PANEL]
        scale = None if self.scale is None else self.scale[sequence, :, span].T
        return decode(codes, scale, self.dtype)

    def _nibbles(self, stored: Buffer, axis: int) -> Buffer:
        """Stored elements as codes; bytes of two codes become twice as many along `axis`."""
        if self.scheme != "int4":
            return stored
        return np.concatenate((stored & 15, stored >> 4), axis=axis).astype(np.int8) - np.int8(8)

    def _scales(self, flat: npt.NDArray[np.int64]) -> Scales:
        if self.scale is None:
            return None
        sequence, slot = np.divmod(flat, self.slots)
        return self.scale[sequence, :, slot]

    def _take(self, flat: npt.NDArray[np.int64]) -> Buffer:
        """Codes (n, K, D) of slots (n,)."""
        sequence, slot = np.divmod(flat, self.slots)
        if self.layout == "sd":
            return self._nibbles(self.data[sequence, :, slot], axis=-1)
        panel, lane = np.divmod(slot, PANEL)
        if self.scheme != "int4":
            return self.data[sequence, :, panel, :, lane]
        stored = self.data[sequence, :, panel, :, lane % (PANEL // 2)]
        high = (lane >= PANEL // 2)[:, None, None]
        return np.where(high, stored >> 4, stored & 15).astype(np.int8) - np.int8(8)

    def _put(
        self, sequence: npt.NDArray[np.int64], slot: npt.NDArray[np.int64], codes: Buffer
    ) -> None:
        if self.scheme == "int4":
            codes = (codes + np.int8(8)).astype(np.uint8)
        if self.layout == "sd":
            if self.scheme == "int4":
                half = self.shape[2] // 2
                codes = codes[..., :half] | codes[..., half:] << 4
            self.data[sequence, :, slot] = codes
            return
        panel, lane = np.divmod(slot, PANEL)
        if self.scheme != "int4":
            self.data[sequence, :, panel, :, lane] = codes
            return
        # Low and high nibbles one after the other: two slots of a step may share their bytes.
        for shift, chosen in ((0, lane < PANEL // 2), (4, lane >= PANEL // 2)):
            at = (sequence[chosen], slice(None), panel[chosen], slice(None), lane[chosen] % 16)
            kept = self.data[at] & np.uint8(0xF0 >> shift)
            self.data[at] = kept | codes[chosen] << np.uint8(shift)


def append(op: Op, cache: Buffer, slots: npt.NDArray[np.int64], values: Buffer) -> None:
    """Write keys or values (T, K, D) of op `op` to their slots (T,).

    Raises CacheOverflow, before anything is written, when the cache's scheme cannot hold them.
    """
    scheme = getattr(cache, "scheme", "f32")  # a plain array holds what the unit computes with
    if scheme != "f32":
        limit = range_limit(scheme)
        good = np.abs(values) <= limit  # NaN is not
        if not good.all():
            raise CacheOverflow(op, int(good.size - good.sum()), good.size, scheme, limit)
    cache[slots] = values


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. Raises ValueError naming what cannot be."""

    layers: int
    context: int  # slots asked for, of each sequence
    kv_heads: int  # K
    head_dim: int  # D
    scheme: str = "f32"
    layout: str = "sd"
    sequences: int = 1  # B
    float_bytes: int = 4  # of an element of the scheme f32, which is the unit's own float

    def __post_init__(self) -> None:
        for name, value, known in (
            ("scheme", self.scheme, SCHEMES), ("layout", self.layout, LAYOUTS),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"cache {name} is {value!r}, expected one of {', '.join(known)}")
        if self.layout == "numpy" and self.scheme != "f32":
            raise ValueError(
                f"cache scheme is {self.scheme!r} in layout 'numpy', which holds 'f32' alone; "
                "choose layout 'sd', 'ds' or 'mixed'"
            )
        for name in ("layers", "context", "kv_heads", "head_dim", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"cache {name} is {getattr(self, name)}, expected at least 1")
        if self.scheme == "int4" and self.head_dim % 2:
            raise ValueError(f"cache head_dim is {self.head_dim}, expected an even number for int4")

    @property
    def slots(self) -> int:
        """S: the context, in whole panels where the layout has panels."""
        panels = self.layout in ("ds", "mixed")
        return -(-self.context // PANEL) * PANEL if panels else self.context

    def part_layout(self, part: str) -> str:
        """The layout of keys ("k") or values ("v")."""
        if self.layout != "mixed":
            return self.layout
        return "ds" if part == "k" else "sd"

    def data_shape(self, part: str) -> tuple[int, ...]:
        """Of the elements or bytes of one part."""
        b, k, s, d = self.sequences, self.kv_heads, self.slots, self.head_dim
        packed = 2 if self.scheme == "int4" else 1
        layout = self.part_layout(part)
        if layout == "numpy":
            return (b * s, k, d)
        return (b, k, s, d // packed) if layout == "sd" else (b, k, s // 32, d, 32 // packed)

    @property
    def bytes_per_position(self) -> int:
        """Keys, values and their scales of one slot in all layers."""
        bits = {"f32": 8 * self.float_bytes, "f16": 16, "int8": 8, "int4": 4}[self.scheme]
        scale = 2 if self.scheme in _LEVELS else 0
        return 2 * self.layers * self.kv_heads * (self.head_dim * bits // 8 + scale)

    @property
    def nbytes(self) -> int:
        """The whole cache, without what aligns its parts."""
        return self.bytes_per_position * self.slots * self.sequences


def estimate_bytes(
    hp: Hyperparameters,
    context: int,
    scheme: str = "f32",
    layout: str = "sd",
    sequences: int = 1,
) -> int:
    """Bytes of a cache for `sequences` sequences of `context` positions each, before making one."""
    shape = CacheShape(hp.layers, context, hp.kv_heads, hp.head_dim, scheme, layout, sequences)
    return shape.nbytes


def zeros(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zero bytes that begin at a multiple of ALIGNMENT; the kernel gives pages as they are used."""
    block = np.zeros(nbytes + ALIGNMENT, np.uint8)
    skip = -block.ctypes.data % ALIGNMENT
    return block[skip : skip + nbytes]


class KVCache:
    """Keys and values of all layers and sequences in one block that is allocated once.

    The block is zero-initialised by the kernel page by page, so memory grows with the positions
    that were written, not with the context that was asked for. `dtype` is the unit's float: what
    views read as, and the elements of scheme f32. `allocate` makes the block of zeros (aligned to
    ALIGNMENT), where it shall not lie on the ordinary heap.
    """

    def __init__(
        self,
        layers: int,
        context: int,
        kv_heads: int,
        head_dim: int,
        *,
        scheme: str = "f32",
        layout: str = "sd",
        sequences: int = 1,
        dtype: Any = np.float32,
        allocate: Callable[[int], npt.NDArray[np.uint8]] = zeros,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = CacheShape(
            layers, context, kv_heads, head_dim, scheme, layout, sequences, self.dtype.itemsize
        )
        self.context, self.scheme, self.layout = context, scheme, layout
        self.sequences, self.slots = sequences, self.shape.slots
        element = {"f32": self.dtype, "f16": np.float16, "int8": np.int8, "int4": np.uint8}[scheme]
        scale_shape = (sequences, kv_heads, self.slots)
        data_bytes = _aligned(_nbytes(self.shape.data_shape("k"), element))  # and of values
        scale_bytes = _aligned(_nbytes(scale_shape, np.float16)) if scheme in _LEVELS else 0
        self.block = allocate((data_bytes + scale_bytes) * layers * len(PARTS))
        self._parts: dict[tuple[int, str], tuple[Buffer, Scales]] = {}
        offset = 0
        for layer in range(layers):
            for part in PARTS:
                data = _carve(self.block, offset, self.shape.data_shape(part), element)
                offset += data_bytes
                scale = _carve(self.block, offset, scale_shape, np.float16) if scale_bytes else None
                offset += scale_bytes
                self._parts[layer, part] = (data, scale)

    def pointers(self, layer: int, part: str) -> tuple[Buffer, Scales]:
        """The memory of `part` ("k" or "v") of a layer: elements or bytes, and scales or None."""
        return self._parts[layer, part]

    def buffers(self) -> State:
        """`L00.k`, `L00.v`, …: (B·S, K, D) that read as floats and take writes by slot."""
        return {
            f"L{layer:02d}.{part}": self._view(part, *memory)
            for (layer, part), memory in self._parts.items()
        }

    def _view(self, part: str, data: Buffer, scale: Scales) -> Buffer:
        if self.layout == "numpy":
            return data
        view = CacheView(
            data,
            scale,
            scheme=self.scheme,
            layout=self.shape.part_layout(part),
            dtype=self.dtype,
            head_dim=self.shape.head_dim,
        )
        return cast(Buffer, view)  # an array to all that index it

    @property
    def bytes_per_position(self) -> int:
        """Bytes that attention reads for each visible slot, scales included."""
        return self.shape.bytes_per_position

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes


def with_buckets(program: Program, spread: float) -> Program:
    """The program whose attention computes sequences of a step in `length_buckets` of `spread`.

    Apply it before any fusion.
    """
    if not spread >= 0:
        raise ValueError(f"buckets are {spread}, expected a ratio from 1 on, or 0 for none")
    ops = (
        dataclasses.replace(op, attributes={**op.attributes, "buckets": spread})
        if op.kind == "attention"
        else op
        for op in program.ops
    )
    return dataclasses.replace(program, ops=tuple(ops))


def length_buckets(visible: npt.NDArray[np.int64], spread: float) -> list[npt.NDArray[np.int64]]:
    """Rows of `visible` (T,) in groups of similar length, shortest first.

    A group's longest is at most `spread` times its shortest, so little of what is computed for it
    is padding. A spread below 1 puts all in one group.
    """
    order = np.argsort(visible, kind="stable")
    if spread < 1 or not len(order):
        return [order]
    ends: list[int] = []
    shortest = visible[order[0]]
    for place, row in enumerate(order):
        if visible[row] > spread * shortest:
            ends.append(place)
            shortest = visible[row]
    return np.split(order, ends)


def _carve(block: npt.NDArray[np.uint8], offset: int, shape: Sequence[int], element: Any) -> Buffer:
    part: Buffer = block[offset : offset + _nbytes(shape, element)].view(element)
    return part.reshape(shape)


def _nbytes(shape: Sequence[int], element: Any) -> int:
    return math.prod(shape) * int(np.dtype(element).itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
