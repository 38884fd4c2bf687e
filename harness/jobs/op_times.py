"""From the trace of some tokens to a table that adds up: every op, the rest, and the whole.

Pure functions of arrays. A token's time is from its call to its return; its ops lie inside. Ops of
several queues may overlap, so what is covered by ops (their union) may be less than their sum; what
is covered by none is the residual: dispatch, waiting, and the caller's own work.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MIDDLE = 0.8  # of the tokens, by their time: the rest met something that is not the engine
_LAYER = re.compile(r"L\d+\.")


@dataclasses.dataclass(frozen=True)
class Times:
    """One position. Times are means over its `tokens` in ms, so that `ops` (n,), overlap and
    residual add up to `traced`: sum(ops) − overlap + residual = traced."""

    position: int  # cached before the token, on average
    tokens: int
    plain: float  # a token without the trace: the honest time
    traced: float
    ops: Floats
    covered: float  # by any op
    typical: int  # row of `Timeline.tokens` whose time is nearest to the mean

    @property
    def overlap(self) -> float:
        return max(0.0, float(self.ops.sum()) - self.covered)

    @property
    def residual(self) -> float:
        return self.traced - self.covered


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Traced tokens of a run. `tokens` (t, 4): depth, position, start and end in ns; `rows` (r, 4):
    the token's row in `tokens`, op's index, start and end in ns."""

    tokens: Ints
    rows: Ints


def timeline(tokens: Mapping[str, Ints], trace: Ints) -> Timeline:
    """From the arrays `tokens` and `trace` of the job.

    Raises ValueError for rows that belong to none of its steps.
    """
    traced = np.asarray(tokens["traced"]) == 1
    starts, durations = tokens["start_ns"][traced], tokens["duration_ns"][traced]
    found = np.stack(
        [tokens["depth"][traced], tokens["position"][traced], starts, starts + durations], axis=1
    )
    steps = np.asarray(tokens["step"][traced])
    order = np.argsort(steps)
    place = np.searchsorted(steps[order], trace[:, 0])
    if not len(steps) or (place >= len(steps)).any() or (steps[order][place] != trace[:, 0]).any():
        raise ValueError("the trace has ops of steps that were not timed")
    if (trace[:, 1] < 0).any() or (trace[:, 3] < trace[:, 2]).any():
        raise ValueError("the trace has ops without a number, or that end before they begin")
    return Timeline(found, np.concatenate([order[place][:, None], trace[:, 1:]], axis=1))


def times_of(tokens: Mapping[str, Ints], line: Timeline, depth: int, ops: int) -> Times:
    """The times at one depth, of a program of `ops` ops; the slowest and fastest tokens are left
    out. Raises ValueError where there are no tokens, or ops that the program has not."""
    plain = (tokens["depth"] == depth) & (tokens["traced"] == 0)
    plain_ms = tokens["duration_ns"][plain] / 1e6
    mine = np.flatnonzero(line.tokens[:, 0] == depth)
    spent = (line.tokens[mine, 3] - line.tokens[mine, 2]) / 1e6
    if not len(mine) or not len(plain_ms) or (line.rows[:, 1] >= ops).any():
        raise ValueError(f"the trace has no token at depth {depth}, or ops beyond {ops}")
    kept = mine[_middle(spent)]
    inside = np.isin(line.rows[:, 0], kept)
    rows = line.rows[inside]
    sums = np.bincount(rows[:, 1], weights=(rows[:, 3] - rows[:, 2]) / 1e6, minlength=ops)
    covered = sum(_union(rows[rows[:, 0] == token, 2:]) for token in kept) / 1e6
    traced = float(spent[_middle(spent)].mean())
    nearest = kept[np.argmin(np.abs((line.tokens[kept, 3] - line.tokens[kept, 2]) / 1e6 - traced))]
    return Times(
        position=round(float(line.tokens[kept, 1].mean())),
        tokens=len(kept),
        plain=float(plain_ms[_middle(plain_ms)].mean()),
        traced=traced,
        ops=sums[:ops] / len(kept),
        covered=covered / len(kept),
        typical=int(nearest),
    )


def _middle(values: Floats) -> Ints:
    """Indices of the middle values, most of them; all of a few."""
    cut = round(len(values) * (1 - MIDDLE) / 2)
    return np.sort(np.argsort(values, kind="stable")[cut : len(values) - cut])


def _union(spans: Ints) -> int:
    """The length that spans (n, 2) cover together."""
    if not len(spans):
        return 0
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    begins = np.maximum(ordered[1:, 0], ends[:-1])
    first = ordered[0, 1] - ordered[0, 0]
    return int(first + np.maximum(ends[1:] - begins, 0).sum())


def group_of(op_id: str) -> str:
    """What an op is called in all layers: `L07.attn.qkv` → `attn.qkv`."""
    return _LAYER.sub("", op_id, count=1)


def bytes_read(op: Mapping[str, Any], kv_bytes: float, position: int) -> int:
    """Weights, and keys and values of the cached positions and the token's own."""
    return int(op["bytes"]) + round(int(op["attends"]) * kv_bytes * (position + 1))
