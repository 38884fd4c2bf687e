"""Numpy over weights as they lie in the package: the fastest that needs no compiler.

A quantised tensor is read once per step, in tiles that stay in the second-level cache: unpack,
multiply, forget. Nothing is dequantised to the heap beyond one tile. Where an op has no weights to
stream, the reference's definition is used as it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.package import Package
from engine.program.ops import Op
from engine.quantize.schemes import GROUP, PackedTensor, widen_bf16
from engine.runtime.state import State
from engine.units.reference import Reference

TILE = 1 << 17  # floats of a tile: 512 KiB, half a second-level cache of small boards
TILE_OUTPUTS = TILE // GROUP  # one group of so many outputs fills a tile

Floats = npt.NDArray[np.float32]


def create(package: Package, *, context: int) -> Packed:
    return Packed(package, context)


class Packed(Reference):
    """Float32 activations; agrees with the reference to a few rounding errors."""

    name = "packed"

    def __init__(self, package: Package, context: int) -> None:
        super().__init__(package, context, np.float32)
        self._bytes = np.empty(TILE, np.uint8)
        self._tile = np.empty(TILE, np.float32)
        self._angles: tuple[Floats, Floats] | None = None
        # Norms and biases are a few kilobytes a layer: held as float32 once.
        self._vectors: dict[str, Floats] = {}

    def _weight(self, name: str, rows: Any = slice(None)) -> npt.NDArray[np.floating]:
        if len(self.package.tensors[name].shape) > 1:
            return super()._weight(name, rows)
        if name not in self._vectors:
            self._vectors[name] = super()._weight(name).astype(np.float32)
        return self._vectors[name]

    def _linear(self, op: Op, state: State) -> None:
        tensor = self.package.tensors[op.weights[0]]
        x = self._input(op, state)  # (T, K)
        if tensor.scheme == "f32":
            y = x @ tensor.parts["data"].T
        elif tensor.scheme in ("f16", "bf16"):
            y = self._half(tensor, x)
        else:
            y = self._grouped(tensor, x)
        for bias in op.weights[1:]:
            y += self._weight(bias)
        state[op.writes[0]] = y

    def _half(self, tensor: PackedTensor, x: Floats) -> Floats:
        """16-bit floats, widened a few output rows at a time."""
        data = tensor.parts["data"]  # (N, K)
        outputs, inputs = tensor.shape
        rows = max(1, TILE // inputs)
        y = np.empty((len(x), outputs), np.float32)
        for start in range(0, outputs, rows):
            chunk = data[start : start + rows]
            wide = widen_bf16(chunk) if tensor.scheme == "bf16" else chunk.astype(np.float32)
            np.matmul(x, wide.T, out=y[:, start : start + rows])
        return y

    def _grouped(self, tensor: PackedTensor, x: Floats) -> Floats:
        outputs = tensor.shape[0]
        y = np.empty((len(x), outputs), np.float32)
        columns = -(-outputs // -(-outputs // TILE_OUTPUTS))  # even tiles of at most TILE_OUTPUTS
        for start in range(0, outputs, columns):
            span = slice(start, min(start + columns, outputs))
            if len(x) == 1:
                y[0, span] = self._row(tensor, x[0], span)
            else:
                y[:, span] = self._rows(tensor, x, span)
        return y

    def _unpack(self, tensor: PackedTensor, groups: slice, span: slice) -> Floats:
        """Integer values of some groups and outputs as float32 in the tile: (g, 32, n)."""
        q = tensor.parts["q"][groups, :, span]
        shape = (q.shape[0], GROUP, q.shape[2])
        count = shape[0] * shape[1] * shape[2]
        tile = self._tile[:count].reshape(shape)
        if tensor.scheme == "q8":
            np.copyto(tile, q)
        else:
            halves = self._bytes[:count].reshape(shape)
            np.bitwise_and(q, 15, out=halves[:, : GROUP // 2])
            np.right_shift(q, 4, out=halves[:, GROUP // 2 :])
            np.copyto(tile, halves)
        return tile

    def _steps(self, tensor: PackedTensor, span: slice) -> range:
        per_group = GROUP * (span.stop - span.start)
        return range(0, tensor.shape[1] // GROUP, max(1, TILE // per_group))

    def _row(self, tensor: PackedTensor, x: Floats, span: slice) -> Floats:
        """One token. Σ_b d_b (Σ_i q_bi x_bi) + (m_b − zero d_b) Σ_i x_bi, groups b, inputs i."""
        x_groups = x.reshape(-1, 1, GROUP)  # (K/32, 1, 32)
        total = np.zeros(span.stop - span.start, np.float32)
        steps = self._steps(tensor, span)
        for start in steps:
            groups = slice(start, start + steps.step)
            partial = np.matmul(x_groups[groups], self._unpack(tensor, groups, span))[:, 0]
            partial *= tensor.parts["d"][groups, span]
            total += partial.sum(axis=0)
        sums = x_groups.sum(axis=(1, 2))  # (K/32,)
        if "m" in tensor.parts:
            total += sums @ tensor.parts["m"][:, span].astype(np.float32)
        if tensor.zero:
            total -= tensor.zero * (sums @ tensor.parts["d"][:, span].astype(np.float32))
        return total

    def _rows(self, tensor: PackedTensor, x: Floats, span: slice) -> Floats:
        """Several tokens: the tile is scaled and used by all of them."""
        total = np.zeros((len(x), span.stop - span.start), np.float32)
        steps = self._steps(tensor, span)
        for start in steps:
            groups = slice(start, start + steps.step)
            tile = self._unpack(tensor, groups, span)
            if tensor.zero:
                tile -= tensor.zero
            tile *= tensor.parts["d"][groups, span].astype(np.float32)[:, None]
            if "m" in tensor.parts:
                tile += tensor.parts["m"][groups, span].astype(np.float32)[:, None]
            inputs = slice(start * GROUP, (start + tile.shape[0]) * GROUP)
            total += x[:, inputs] @ tile.reshape(-1, tile.shape[2])
        return total

    def _rope(self, op: Op, state: State) -> None:
        if self._angles is None:
            angle = np.arange(self.context, dtype=np.float64)[:, None] * self._frequencies(op)
            scale = self.hp.rope_scale
            # both (S, D/2)
            wide = (np.cos(angle) * scale, np.sin(angle) * scale)
            self._angles = (wide[0].astype(np.float32), wide[1].astype(np.float32))
        positions = state[op.reads[2]]
        cos, sin = (table[positions][:, None] for table in self._angles)  # (T, 1, D/2)
        half = self.hp.head_dim // 2
        for source, target in zip(op.reads[:2], op.writes):
            x = state[source].reshape(len(positions), -1, 2, half)  # (T, H, 2, D/2)
            first, second = x[:, :, 0], x[:, :, 1]
            rotated = np.empty_like(x)
            np.subtract(first * cos, second * sin, out=rotated[:, :, 0])
            np.add(second * cos, first * sin, out=rotated[:, :, 1])
            state[target] = rotated.reshape(len(positions), -1)

    def _attention(self, op: Op, state: State) -> None:
        """All query heads of a key/value head in one product: (K, T·G, D) × (K, D, S)."""
        q_name, k_name, v_name, positions_name = op.reads
        positions, hp = state[positions_name], self.hp
        tokens, groups = len(positions), hp.heads // hp.kv_heads
        length = int(positions[-1]) + 1
        q_TKGD = state[q_name].reshape(tokens, hp.kv_heads, groups, hp.head_dim)
        q_KTGD = (q_TKGD * np.float32(hp.head_dim**-0.5)).transpose(1, 0, 2, 3)
        q = q_KTGD.reshape(hp.kv_heads, tokens * groups, hp.head_dim)
        k_KDS = state[k_name][:length].transpose(1, 2, 0)
        v_KSD = state[v_name][:length].transpose(1, 0, 2)
        scores = np.matmul(q, k_KDS)  # (K, T·G, S)
        if tokens > 1:
            hidden = np.arange(length) > positions[:, None]  # (T, S)
            by_token = scores.reshape(hp.kv_heads, tokens, groups, length)
            by_token[np.broadcast_to(hidden[None, :, None], by_token.shape)] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.matmul(scores, v_KSD).reshape(hp.kv_heads, tokens, groups, hp.head_dim)
        state[op.writes[0]] = mixed.transpose(1, 0, 2, 3).reshape(tokens, -1)
