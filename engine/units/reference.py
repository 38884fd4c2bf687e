"""The definition of every op, in numpy: slow and obvious. Other units are tested against it.

Weights are dequantised for each op and dropped again. With dtype float64 this is the exact
reference; with float32 it is the naive implementation that sets the error one may expect.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.architectures import Hyperparameters
from engine.package import Package
from engine.program.ops import Op
from engine.quantize.activations import dequantise, quantise
from engine.quantize.schemes import dequantize
from engine.runtime.cache import append
from engine.runtime.state import Buffer, State
from engine.units.base import execute_parts

TILE_VALUES = 1 << 22  # weights dequantised at a time: 32 MiB as float64


def create(package: Package, *, context: int, dtype: Any = np.float32) -> Reference:
    return Reference(package, context, dtype)


class Reference:
    """One method per op kind. T new tokens, S cached positions, H/K heads, D head dimension."""

    name = "reference"

    def __init__(self, package: Package, context: int, dtype: Any = np.float32) -> None:
        self.package, self.context, self.dtype = package, context, dtype
        self.hp: Hyperparameters = package.hyperparameters

    def execute(self, op: Op, state: State) -> None:
        getattr(self, f"_{op.kind}")(op, state)

    def _fused(self, op: Op, state: State) -> None:
        execute_parts(self.execute, op, state)

    def _weight(self, name: str, rows: Any = slice(None)) -> npt.NDArray[np.floating]:
        return dequantize(self.package.tensors[name], rows).astype(self.dtype, copy=False)

    def _embed(self, op: Op, state: State) -> None:
        state[op.writes[0]] = self._weight(op.weights[0], state[op.reads[0]])  # (T, M)

    def _rmsnorm(self, op: Op, state: State) -> None:
        """x / √(mean x² + ε) · w (Zhang & Sennrich 2019), over M or, with `heads`, over each D."""
        x = state[op.reads[0]]  # (T, M) or (T, H*D)
        shape = x.shape
        if "heads" in op.attributes:
            x = x.reshape(len(x), op.attributes["heads"], -1)  # (T, H, D)
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=self.dtype)
        scaled = x / np.sqrt(mean_square + self.dtype(self.hp.rms_eps))
        state[op.writes[0]] = (scaled * self._weight(op.weights[0])).reshape(shape)

    def _linear(self, op: Op, state: State) -> None:
        x, (outputs, inputs) = self._input(op, state), self.package.tensors[op.weights[0]].shape
        y = np.empty((len(x), outputs), self.dtype)
        # Some rows at a time: the head of a large model would fill gigabytes as float64.
        rows = max(1, TILE_VALUES // inputs)
        for start in range(0, outputs, rows):
            tile = slice(start, start + rows)
            y[:, tile] = x @ self._weight(op.weights[0], tile).T  # (T, K) @ (K, n)
        for bias in op.weights[1:]:
            y = y + self._weight(bias)
        state[op.writes[0]] = y

    def _input(self, op: Op, state: State) -> npt.NDArray[Any]:
        """What a linear op multiplies: (T, K), rounded to int8 steps where the op asks for it."""
        x = state[op.reads[0]]
        activations = op.attributes.get("activations", "float")
        if activations == "int8":
            return dequantise(*quantise(x), self.dtype)
        if activations != "float":
            raise ValueError(f"op {op.id}: activations {activations!r}, expected float or int8")
        return x

    def _rope(self, op: Op, state: State) -> None:
        """Rotates (x_i, x_{i+D/2}) by position · inverse frequency i (Su et al. 2021)."""
        q, k, positions, *prefix = op.reads
        # With a ring, queries are rotated a second time, for reading the prefix.
        rotations = [(q, positions), (k, positions), *((q, places) for places in prefix)]
        for (source, places), target in zip(rotations, op.writes):
            state[target] = self._rotated(op, state[source], state[places])

    def _rotated(self, op: Op, x: Buffer, positions: npt.NDArray[np.int64]) -> Buffer:
        """(T, H·D) of `x` (T, H·D), token by token for `positions` (T,)."""
        angle = positions[:, None].astype(np.float64) * self._frequencies(op)  # (T, D/2)
        scale = self.hp.rope_scale
        cos = (np.cos(angle) * scale).astype(self.dtype)[:, None]  # (T, 1, D/2)
        sin = (np.sin(angle) * scale).astype(self.dtype)[:, None]
        x_THD = x.reshape(len(positions), -1, self.hp.head_dim)
        half = self.hp.head_dim // 2
        first, second = x_THD[..., :half], x_THD[..., half:]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return np.concatenate(rotated, axis=-1).reshape(len(positions), -1)

    def _frequencies(self, op: Op) -> npt.NDArray[np.float64]:
        """(D/2,) radians per position, from the package."""
        return self.package.tensors[op.weights[0]].parts["data"].astype(np.float64, copy=False)

    def _kv_append(self, op: Op, state: State) -> None:
        slots = state[op.reads[2]]
        shape = (len(slots), self.hp.kv_heads, self.hp.head_dim)
        for source, cache in zip(op.reads[:2], op.writes):
            append(op, state[cache], slots, state[source].reshape(shape))

    def _attention(self, op: Op, state: State) -> None:
        """softmax(q kᵀ / √D) v, head by head, over the slots that a token may see.

        Sequence by sequence, each in its own length: no neighbour changes any bit. With a ring the
        first `keep` slots are read with the queries rotated for them.
        """
        q_name, k_name, v_name, starts, visible, *prefix = op.reads
        queries = [
            state[name].reshape(-1, self.hp.heads, self.hp.head_dim) for name in (q_name, *prefix)
        ]
        out_THD = np.empty_like(queries[0])
        for start in np.unique(state[starts]):
            rows = np.flatnonzero(state[starts] == start)  # the tokens of one sequence
            seen = state[visible][rows]
            slots = slice(int(start), int(start + seen.max()))
            keys, values = state[k_name][slots], state[v_name][slots]
            out_THD[rows] = self._mixed(op, [q[rows] for q in queries], keys, values, seen)
        state[op.writes[0]] = out_THD.reshape(len(out_THD), -1)

    def _mixed(
        self,
        op: Op,
        queries: list[Buffer],  # (T, H, D); a second for the prefix, with a ring
        k_SKD: Buffer,
        v_SKD: Buffer,
        visible: npt.NDArray[np.int64],
    ) -> Buffer:
        """(T, H, D) for tokens of one sequence, each seeing its first `visible` of S slots."""
        hp = self.hp
        hidden = np.arange(len(k_SKD)) >= visible[:, None]  # (T, S)
        out_THD = np.empty_like(queries[0])
        for head in range(hp.heads):
            group = head * hp.kv_heads // hp.heads
            scores_TS = queries[0][:, head] @ k_SKD[:, group].T
            for q_THD in queries[1:]:
                keep = int(op.attributes["keep"])
                scores_TS[:, :keep] = q_THD[:, head] @ k_SKD[:keep, group].T
            scores_TS = scores_TS / self.dtype(hp.head_dim**0.5)
            scores_TS = np.where(hidden, self.dtype(-np.inf), scores_TS)
            scores_TS = np.exp(scores_TS - scores_TS.max(axis=-1, keepdims=True))
            scores_TS /= scores_TS.sum(axis=-1, keepdims=True)
            out_THD[:, head] = scores_TS @ v_SKD[:, group]
        return out_THD

    def _swiglu(self, op: Op, state: State) -> None:
        """gate · sigmoid(gate) · up (Shazeer 2020)."""
        gate, up = state[op.reads[0]], state[op.reads[1]]  # (T, F)
        state[op.writes[0]] = gate / (1 + np.exp(-np.clip(gate, -80, None))) * up

    def _add(self, op: Op, state: State) -> None:
        state[op.writes[0]] = state[op.reads[0]] + state[op.reads[1]]

    def _select(self, op: Op, state: State) -> None:
        source, rows = op.reads
        selected: Buffer = state[source][state[rows]]  # (R, M)
        state[op.writes[0]] = selected
