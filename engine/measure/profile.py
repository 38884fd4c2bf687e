"""The op profile, the board's part: when each op of a token ran, and what the board did meanwhile.

The cache is filled once. Then tokens are decoded at a shallow and at a deep position in turns, with
the trace and without it: without it for the honest time of a token and for what is counted (time on
the CPU, page faults, context switches, hardware counters), with it for the ops. The order is turned
round from round to round, so that heat falls on all alike.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.measure.activity import NOTHING, Usage, accelerators, busy_shares, cores, usage
from engine.measure.context import JobContext, JobError
from engine.measure.counters import Counters
from engine.measure.curve import (
    CHUNK,
    SHORTEST,
    Tokens,
    move_to,
    native_bandwidth,
    read_bandwidth,
    sample_costs,
)
from engine.measure.golden import golden
from engine.runtime.trace import Trace

if TYPE_CHECKING:
    from engine.decode import Decoder
    from engine.package import Package
    from engine.program.ops import Op

ROUNDS = 4  # an even number: each order comes as often as its reverse
MOST_TOKENS, FEWEST_TOKENS = 32, 2  # of one visit
MOST_ROWS = 120_000  # of the trace: 4 MB
PREFILL_SHARE = 0.4  # of the time budget, at most
TRACED, PLAIN = True, False


@dataclasses.dataclass
class Depth:
    """One position, and what was counted there without the trace."""

    position: int
    tokens: int = 0
    used: Usage = NOTHING
    counted: dict[str, float] = dataclasses.field(default_factory=dict)


def run(context: JobContext) -> None:
    tokens: Tokens = context.require("tokens")
    budget_s = float(context.parameter("budget_s"))
    began = time.monotonic()
    decoder = context.decoder(context=int(context.parameter("context")))
    context.progress(0, budget_s, "checking a golden generation")
    golden(decoder, context, "before")
    reached = fill_within(decoder, tokens, PREFILL_SHARE * budget_s, context, budget_s)
    if reached < 2 * SHORTEST:
        raise JobError(f"profile: {reached} positions, expected at least {2 * SHORTEST}")
    context.data("context", {"asked": len(tokens), "reached": reached})
    context.data("program", describe(decoder))
    cost_s = float(np.mean(sample_costs(decoder, tokens, reached)))
    left_s = budget_s - (time.monotonic() - began)
    count = tokens_per_visit(cost_s, left_s, reached, len(decoder.program.ops))
    depths = (Depth(SHORTEST), Depth(reached - count))
    trace = Trace(ROUNDS * len(depths) * count * len(decoder.program.ops) + 1)
    before, began_ns = cores(), time.monotonic_ns()
    counters = Counters()  # the decoder has its threads by now
    loads: list[dict[str, float]] = []
    rows = []
    try:
        for number in range(ROUNDS):
            visits = [(index, traced) for index in range(len(depths)) for traced in (PLAIN, TRACED)]
            for index, traced in visits if number % 2 else reversed(visits):
                into = trace if traced else None
                rows += visit(decoder, tokens, depths[index], index, count, into, counters)
                loads.append(accelerators())
            done = time.monotonic() - began
            context.progress(done, budget_s, f"timing ops, round {number + 1}")
    finally:
        counters.close()
    context.array("tokens", **_columns(rows), began_ns=np.array(began_ns, np.int64))
    context.array("trace", rows=trace.rows())
    context.data(
        "activity",
        {
            "depths": [
                {"position": depth.position, "tokens": depth.tokens, "counters": depth.counted,
                 **dataclasses.asdict(depth.used)}
                for depth in depths
            ],
            "cores": busy_shares(before, cores()),
            "accelerators": {
                name: float(np.mean([load[name] for load in loads if name in load]))
                for name in sorted({name for load in loads for name in load})
            },
            "counters_missing": counters.missing,
        },
    )  # fmt: skip
    context.data("bandwidth", native_bandwidth(decoder) or read_bandwidth(decoder.package))
    golden(decoder, context, "after")


def fill_within(
    decoder: Decoder, tokens: Tokens, seconds: float, context: JobContext, budget_s: float
) -> int:
    """Prefill `tokens` in chunks until they or the time end; how many positions are cached."""
    decoder.reset()
    began = time.monotonic()
    for start in range(0, len(tokens), CHUNK):
        decoder.advance(tokens[start : start + CHUNK])
        spent = time.monotonic() - began
        context.progress(spent, budget_s, f"filling the cache: {decoder.position} positions")
        if spent > seconds:
            break
    return decoder.position


def tokens_per_visit(cost_s: float, left_s: float, reached: int, ops: int) -> int:
    """As many as the time, the trace and the cached sequence allow."""
    visits = 2 * 2 * ROUNDS  # depths, with and without the trace
    count = int(max(0.0, left_s) / max(cost_s, 1e-9) / visits)
    count = min(count, MOST_TOKENS, MOST_ROWS // (2 * ROUNDS * ops), reached - SHORTEST)
    return max(FEWEST_TOKENS, count)


def visit(
    decoder: Decoder,
    tokens: Tokens,
    depth: Depth,
    index: int,
    count: int,
    trace: Trace | None,
    counters: Counters,
) -> list[tuple[int, ...]]:
    """`count` tokens from a depth on: (depth, traced, position, step, start and duration in ns)."""
    move_to(decoder, depth.position)
    decoder.executor.trace = trace
    rows: list[tuple[int, ...]] = []
    before = usage()
    if trace is None:
        counters.start()
    for position in range(depth.position, depth.position + count):
        fed, step = tokens[position : position + 1], decoder.executor.step
        start = time.monotonic_ns()
        decoder.advance(fed)
        spent = time.monotonic_ns() - start
        rows.append((index, int(trace is not None), position, step, start, spent))
    if trace is None:
        for name, value in counters.stop().items():
            depth.counted[name] = depth.counted.get(name, 0.0) + value
        depth.used = depth.used.plus(usage().since(before))
        depth.tokens += count
    decoder.executor.trace = None
    return rows


def _columns(rows: list[tuple[int, ...]]) -> dict[str, npt.NDArray[np.int64]]:
    table = np.array(rows, np.int64)
    names = ("depth", "traced", "position", "step", "start_ns", "duration_ns")
    return {name: table[:, index] for index, name in enumerate(names)}


def describe(decoder: Decoder) -> dict[str, Any]:
    """The ops by their index in the trace, and what each reads: `bytes` of weights a token, and
    `attends` times the keys and values of one layer."""
    return {
        "ops": [
            {
                "id": op.id,
                "kinds": [part.kind for part in op.parts],
                "part": part,
                "bytes": weight_bytes(op, decoder.package),
                "attends": sum(inner.kind == "attention" for inner in op.parts),
            }
            for op, part in zip(decoder.program.ops, decoder.executor.parts)
        ],
        "kv_bytes": decoder.kv_bytes_per_position / decoder.hyperparameters.layers,
        "weight_bytes": decoder.weight_bytes,
        "kv_bytes_per_position": decoder.kv_bytes_per_position,
        "threads": decoder.options.threads or 1,
    }


def weight_bytes(op: Op, package: Package) -> int:
    """Bytes of weights that one token's op reads; of an embedding it reads one row."""
    total = 0
    for part in op.parts:
        for name in part.weights:
            tensor = package.tensors[name]
            rows = tensor.shape[0] if part.kind == "embed" else 1
            total += tensor.nbytes // rows
    return total
