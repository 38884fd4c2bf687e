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
        positions = state[op.reads[2]]  # (T,)
        angle = positions[:, None].astype(np.float64) * self._frequencies(op)  # (T, D/2)
        scale = self.hp.rope_scale
        cos = (np.cos(angle) * scale).astype(self.dtype)[:, None]  # (T, 1, D/2)
        sin = (np.sin(angle) * scale).astype(self.dtype)[:, None]
        for source, target in zip(op.reads[:2], op.writes):
            x = state[source].reshape(len(positions), -1, self.hp.head_dim)  # (T, H, D)
            half = self.hp.head_dim // 2
            first, second = x[..., :half], x[..., half:]
            rotated = (first * cos - second * sin, second * cos + first * sin)
            state[target] = np.concatenate(rotated, axis=-1).reshape(len(positions), -1)

    def _frequencies(self, op: Op) -> npt.NDArray[np.float64]:
        """(D/2,) radians per position, from the package."""
        return self.package.tensors[op.weights[0]].parts["data"].astype(np.float64, copy=False)

    def _kv_append(self, op: Op, state: State) -> None:
        positions = state[op.reads[2]]
        shape = (len(positions), self.hp.kv_heads, self.hp.head_dim)
        for source, cache in zip(op.reads[:2], op.writes):
            state[cache][positions] = state[source].reshape(shape)

    def _attention(self, op: Op, state: State) -> None:
        """softmax(q kᵀ / √D) v, head by head; position p sees positions up to p."""
        q_name, k_name, v_name, positions_name = op.reads
        positions = state[positions_name]
        hp = self.hp
        q_THD = state[q_name].reshape(len(positions), hp.heads, hp.head_dim)
        length = int(positions[-1]) + 1
        k_SKD, v_SKD = state[k_name][:length], state[v_name][:length]
        hidden = np.arange(length) > positions[:, None]  # (T, S)
        out_THD = np.empty_like(q_THD)
        for head in range(hp.heads):
            group = head * hp.kv_heads // hp.heads
            scores_TS = q_THD[:, head] @ k_SKD[:, group].T / self.dtype(hp.head_dim**0.5)
            scores_TS = np.where(hidden, self.dtype(-np.inf), scores_TS)
            scores_TS = np.exp(scores_TS - scores_TS.max(axis=-1, keepdims=True))
            scores_TS /= scores_TS.sum(axis=-1, keepdims=True)
            out_THD[:, head] = scores_TS @ v_SKD[:, group]
        state[op.writes[0]] = out_THD.reshape(len(positions), -1)

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
