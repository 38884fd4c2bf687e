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
from engine.quantize.schemes import GROUP, PackedTensor, dequantize, widen_bf16
from engine.runtime.cache import length_buckets
from engine.runtime.state import Buffer, State
from engine.units.reference import Reference

TILE = 1 << 17  # floats of a tile: 512 KiB, half a second-level cache of small boards
TILE_OUTPUTS = TILE // GROUP  # one group of so many outputs fills a tile
# A bucket's keys and values are copied side by side for one product; beyond so many slots each
# sequence is faster where it lies (eight of 1000 slots: 2.7 ms against 14 ms copied).
GATHERED_SLOTS = 128
BUCKET_SPREAD = 1.25  # longest over shortest sequence that attention computes together

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
        self._turned: dict[bytes, Floats] = {}  # positions → cosines and sines, (2, T, 1, D/2)
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
        outputs, inputs = tensor.shape
        y = np.empty((len(x), outputs), np.float32)
        if tensor.layout != "blocked":  # lies for other units: some output rows at a time
            rows = max(16, TILE // inputs // 16 * 16)
            for start in range(0, outputs, rows):
                tile = dequantize(tensor, slice(start, start + rows))
                np.matmul(x, tile.T, out=y[:, start : start + rows])
            return y
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

    def _scales(self, tensor: PackedTensor, part: str, groups: slice, span: slice) -> Floats:
        """`d` or `m` of some groups of 32 inputs: (g, n), or (2 g, n) where each half has its own.

        The values of a wider group are repeated.
        """
        scales = tensor.parts[part]
        if tensor.group <= GROUP:
            halves = GROUP // tensor.group
            chosen = scales[groups.start * halves : groups.stop * halves, span]
        else:
            stop = min(groups.stop, tensor.shape[1] // GROUP)
            chosen = scales[np.arange(groups.start, stop) // (tensor.group // GROUP), span]
        return chosen.astype(np.float32, copy=False)

    def _row(self, tensor: PackedTensor, x: Floats, span: slice) -> Floats:
        """One token. Σ_b d_b (Σ_i q_bi x_bi) + (m_b − zero d_b) Σ_i x_bi, groups b, inputs i."""
        run = min(GROUP, tensor.group)  # inputs that share a scale and lie in one group of 32
        x_runs = x.reshape(-1, 1, run)  # (K/run, 1, run)
        total = np.zeros(span.stop - span.start, np.float32)
        steps = self._steps(tensor, span)
        for start in steps:
            groups = slice(start, start + steps.step)
            tile = self._unpack(tensor, groups, span)
            runs = slice(start * GROUP // run, groups.stop * GROUP // run)
            partial = np.matmul(x_runs[runs], tile.reshape(-1, run, tile.shape[2]))[:, 0]
            partial *= self._scales(tensor, "d", groups, span)
            total += partial.sum(axis=0)
        sums = x.reshape(-1, tensor.group).sum(axis=1)  # (K/group,)
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
            by_run = tile.reshape(-1, min(GROUP, tensor.group), tile.shape[2])
            by_run *= self._scales(tensor, "d", groups, span)[:, None]
            if "m" in tensor.parts:
                by_run += self._scales(tensor, "m", groups, span)[:, None]
            inputs = slice(start * GROUP, (start + tile.shape[0]) * GROUP)
            total += x[:, inputs] @ tile.reshape(-1, tile.shape[2])
        return total

    def _rotated(self, op: Op, x: Buffer, positions: npt.NDArray[np.int64]) -> Buffer:
        key = positions.tobytes()
        turned = self._turned.get(key)
        if turned is None:  # once a step, not for queries and keys of each layer
            angle = positions[:, None].astype(np.float64) * self._frequencies(op)
            wide = np.stack((np.cos(angle), np.sin(angle))) * self.hp.rope_scale
            turned = wide.astype(np.float32)[:, :, None]
            # A ring's queries have two positions; whole, so that no other thread sees it change.
            newest = list(self._turned.items())[-1:]
            self._turned = {**dict(newest), key: turned}
        cos, sin = turned  # (T, 1, D/2)
        halves = x.reshape(len(positions), -1, 2, self.hp.head_dim // 2)  # (T, H, 2, D/2)
        first, second = halves[:, :, 0], halves[:, :, 1]
        rotated = np.empty_like(halves)
        np.subtract(first * cos, second * sin, out=rotated[:, :, 0])
        np.add(second * cos, first * sin, out=rotated[:, :, 1])
        return rotated.reshape(len(positions), -1)

    def _attention(self, op: Op, state: State) -> None:
        """All query heads of a key/value head in one product; tokens of several sequences bucket by
        bucket, each as long as its longest."""
        q_name, k_name, v_name, starts_name, visible_name, *prefix = op.reads
        starts, visible, hp = state[starts_name], state[visible_name], self.hp
        shape = (len(starts), hp.kv_heads, hp.heads // hp.kv_heads, hp.head_dim)
        queries = [
            state[name].reshape(shape) * np.float32(hp.head_dim**-0.5) for name in (q_name, *prefix)
        ]
        if len(starts) == 1 or (starts == starts[0]).all():
            slots = slice(int(starts[0]), int(starts[0] + visible.max()))
            mixed = self._mixed(op, queries, state[k_name][slots], state[v_name][slots], visible)
        else:
            mixed = np.empty_like(queries[0])
            for rows in self._together(visible, op.attributes.get("buckets", BUCKET_SPREAD)):
                longest = int(visible[rows].max())
                if len(rows) == 1:  # where it lies, without a copy
                    at = slice(int(starts[rows[0]]), int(starts[rows[0]]) + longest)
                    keys, values = state[k_name][at][None], state[v_name][at][None]
                else:
                    places = starts[rows, None] + np.arange(longest)  # (n, S)
                    keys, values = state[k_name][places], state[v_name][places]
                turned = [q[rows, None] for q in queries]
                part = self._mixed(op, turned, keys, values, visible[rows, None])
                mixed[rows] = part[:, 0]
        state[op.writes[0]] = mixed.reshape(len(starts), -1)

    @staticmethod
    def _together(visible: Buffer, spread: float) -> list[npt.NDArray[np.int64]]:
        """Buckets of tokens; without those whose copies cost more than the calls they save."""
        found: list[npt.NDArray[np.int64]] = []
        for rows in length_buckets(visible, spread):
            long = spread >= 1 and visible[rows].max() > GATHERED_SLOTS
            found += np.split(rows, len(rows)) if long else [rows]
        return found

    def _mixed(
        self, op: Op, queries: list[Buffer], keys: Buffer, values: Buffer, visible: Buffer
    ) -> Buffer:
        """(…, T, K, G, D) for queries (…, T, K, G, D), divided by √D, over keys and values
        (…, S, K, D), of which a token sees the first `visible` (…, T): (T·G, D) × (D, S) each."""
        *outer, tokens, kv_heads, groups, head_dim = queries[0].shape
        length = keys.shape[-3]
        flat = (*outer, kv_heads, tokens * groups, head_dim)
        q, *prefix = (x.swapaxes(-4, -3).reshape(flat) for x in queries)
        k_KDS, v_KSD = keys.swapaxes(-3, -2).swapaxes(-2, -1), values.swapaxes(-3, -2)
        scores = np.matmul(q, k_KDS)  # (…, K, T·G, S)
        for q_prefix in prefix:
            keep = int(op.attributes["keep"])
            scores[..., :keep] = np.matmul(q_prefix, k_KDS[..., :keep])
        if visible.size > 1 and visible.min() < length:
            hidden = np.arange(length) >= visible[..., None]  # (…, T, S)
            by_token = scores.reshape(*outer, kv_heads, tokens, groups, length)
            hidden = hidden[..., None, :, None, :]
            by_token[np.broadcast_to(hidden, by_token.shape)] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.matmul(scores, v_KSD).reshape(*outer, kv_heads, tokens, groups, head_dim)
        by_token_first: Buffer = mixed.swapaxes(-4, -3)
        return by_token_first
