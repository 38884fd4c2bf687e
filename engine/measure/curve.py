"""The latency curve, the board's part: time per token at many cache lengths.

The cache is filled once. Then each sweep visits all lengths in an order of its own: the decoder
goes back to a length and decodes the next tokens of the same fixed sequence, which writes the same
keys and values again, so the cache stays whole. One ascending sweep would mix length with heat.

A time budget decides how many lengths and tokens there are: the board is timed briefly first.

Last, one decode step at a few depths tells its logits, which the host compares with the reference:
by then the cache holds what prefill and the sweeps' single steps have written.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.measure.context import JobContext, JobError
from engine.measure.golden import golden

if TYPE_CHECKING:
    from engine.decode import Decoder
    from engine.package import Package

Tokens = npt.NDArray[np.int64]

SHORTEST = 16  # positions in the cache at the first point
CHUNK = 128  # tokens of one prefill step
MOST_POINTS, FEWEST_POINTS = 28, 10
MOST_TOKENS, FEWEST_TOKENS = 32, 3  # at one point
PREFILL_SHARE = 0.5  # of the time budget, at most, before the context is shortened
READ_BYTES = 64 << 20  # for the bandwidth, where the package is smaller than a cache
NATIVE_READ_BYTES = 256 << 20  # no cache of a board holds it
READ_ROUNDS = 4
TTFT_RUNS = 3
TTFT_SHARE = 0.25  # of the time budget, at most, for the timed first tokens
TRIAL_TOKENS = 16  # of the prompt that tells how fast prefill is
DEPTH_PARTS = (8, 4, 2, 1)  # the depths are these fractions of the context
TOP = 64  # logits that are told at each depth


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`orders` (sweeps, points): indices into `lengths`."""

    lengths: Tokens
    tokens_per_point: int
    orders: npt.NDArray[np.int64]


def run(context: JobContext) -> None:
    tokens: Tokens = context.require("tokens")
    asked = int(context.parameter("context"))
    budget_s = float(context.parameter("budget_s"))
    sweeps = int(context.parameter("sweeps", 3))
    began = time.monotonic()
    decoder = context.decoder(context=asked)
    context.progress(0, budget_s, "checking a golden generation")
    golden(decoder, context, "before")
    wanted = tokens[: int(context.parameter("ttft_tokens"))]
    ttft = first_token(decoder, wanted, TTFT_SHARE * budget_s, context, began)
    context.data("ttft", ttft)

    fixed = context.spec.parameters.get("lengths")
    reached = asked
    if fixed is None:
        possible = ttft["tokens_per_s"] * PREFILL_SHARE * (budget_s - (time.monotonic() - began))
        reached = int(max(4 * SHORTEST, min(asked, possible // CHUNK * CHUNK)))
    context.data("context", {"asked": asked, "reached": reached})
    prefill = fill(decoder, tokens[:reached], context, budget_s, began)
    context.data("prefill", prefill)

    costs = sample_costs(decoder, tokens, reached)
    left_s = budget_s - (time.monotonic() - began)
    schedule = plan_points(reached, fixed, sweeps, float(np.mean(costs)), left_s, context.spec.seed)
    context.data(
        "schedule",
        {
            "lengths": schedule.lengths,
            "tokens_per_point": schedule.tokens_per_point,
            "sweeps": sweeps,
            "weight_bytes": decoder.weight_bytes,
            "kv_bytes_per_position": decoder.kv_bytes_per_position,
        },
    )
    context.array("tokens", **sweep(decoder, tokens, schedule, context, budget_s, began))
    context.progress(time.monotonic() - began, budget_s, "telling logits at depth")
    context.array("depth", **at_depths(decoder, tokens, reached))
    occupy(decoder, reached)
    context.data("memory", {"peak_rss_mb": peak_rss_mb(), "positions": asked})
    # Behind the peak: neither its block nor the pages that a step leaves alone belong to it.
    context.data("bandwidth", native_bandwidth(decoder) or read_bandwidth(decoder.package))
    golden(decoder, context, "after")


def occupy(decoder: Decoder, reached: int) -> None:
    """Write the cache's slots from `reached` on, which nothing has read, so that the memory of the
    whole context is in use. Whether the kernel gave it before depends on its page size."""
    for buffer in decoder.cache.buffers().values():  # (S, K, D)
        buffer[reached:] = 0


def at_depths(decoder: Decoder, tokens: Tokens, reached: int) -> dict[str, Any]:
    """The logits of one decode step each, with 1/8, 1/4, 1/2 and all of `reached` cached behind it.

    `positions` (n,): tokens in the cache after the step; `best` (n,): the id that greedy decoding
    would choose; `ids` and `values` (n, TOP): the largest logits.
    """
    positions = sorted({max(1, reached // part) for part in DEPTH_PARTS})
    best, ids, values = [], [], []
    for position in positions:
        move_to(decoder, position - 1)
        logits = decoder.advance(tokens[position - 1 : position])
        count = min(TOP, len(logits))
        top = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
        best.append(int(np.argmax(logits)))
        ids.append(top)
        values.append(logits[top])
    move_to(decoder, reached)
    return {
        "positions": np.array(positions, np.int64),
        "best": np.array(best, np.int64),
        "ids": np.array(ids, np.int64),
        "values": np.array(values, np.float32),
    }


def peak_rss_mb() -> float:
    """This process's memory high-water mark in MiB."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    # Elsewhere; on Linux it may still count the process that this one was forked from.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def native_bandwidth(decoder: Decoder) -> dict[str, Any] | None:
    """How fast this board reads memory in the decoder's threads with the native library: one
    stream a thread as a plain loop does it, and the best of a few ways. None for another unit.

    A ceiling that claims to be one has to be the best read found, not the first.
    """
    unit = getattr(decoder.unit, "unit", decoder.unit)  # of one with planted faults
    library = getattr(unit, "library", None)
    if library is None:
        return None
    from engine.measure.memory import limits_here

    threads = decoder.options.threads or 1
    available = limits_here().available
    size = NATIVE_READ_BYTES
    if available is not None:  # a small board keeps most of its memory
        size = max(READ_BYTES, min(size, int(available * 2**20) // 8))
    ways = ((1, 0, False), (1, 0, True), (4, 512, False), (4, 512, True))
    passes = {way: library.read_rates(threads, size, *way, READ_ROUNDS) for way in ways}
    rates = {way: max(found, default=0.0) for way, found in passes.items()}
    best = max(rates, key=lambda way: rates[way])
    if rates[best] <= 0:  # it could not have the memory
        return None
    streams, _, huge = best
    pages = "huge pages" if huge else "4 KiB pages"
    return {
        "gb_s": rates[best],
        "linear_gb_s": rates[ways[0]],
        "bytes": size,
        "what": f"the best read found: {threads} thread{'' if threads == 1 else 's'}, {streams} "
        f"stream{'' if streams == 1 else 's'} each, {pages}",
    }


def read_bandwidth(package: Package) -> dict[str, Any]:
    """How fast one thread reads memory in one direction with numpy: the best of a few rounds.

    Reads the weights of a decode step where they are mapped; a small package would stay in a
    cache, so then a block of its own.
    """
    if package.weight_bytes >= READ_BYTES // 2:
        blocks, what = list(_weights(package)), "the mapped weights"
    else:
        blocks, what = [np.ones(READ_BYTES // 8, np.uint64)], "a block of memory"
    size = sum(block.nbytes for block in blocks)
    seconds = []
    for _ in range(READ_ROUNDS):
        begin = time.perf_counter()
        for block in blocks:
            np.bitwise_or.reduce(block)
        seconds.append(time.perf_counter() - begin)
    return {
        "gb_s": size / min(seconds) / 1e9,
        "bytes": size,
        "what": f"linear read of {what} by numpy, 1 thread, best of {READ_ROUNDS}",
    }


def _weights(package: Package) -> Iterator[npt.NDArray[np.uint64]]:
    """The bytes that `Package.weight_bytes` counts, as views of the mapping in whole words."""
    for name, tensor in package.tensors.items():
        if name == "embed" and not package.hyperparameters.tied:
            continue
        for part in tensor.parts.values():
            raw = part.reshape(-1).view(np.uint8)
            words = raw[: len(raw) // 8 * 8].view(np.uint64)
            if len(words):
                yield words


def first_token(
    decoder: Decoder, prompt: Tokens, seconds: float, context: JobContext, began: float
) -> dict[str, Any]:
    """Time from a prompt to its first token: the median of TTFT_RUNS after one that warms up.

    The warm-up, a short prompt, says how much of `prompt` fits in `seconds`; at least as much as
    the warm-up had is taken.
    """
    trial = prompt[:TRIAL_TOKENS]
    first_s = _time_to_token(decoder, trial)
    room = int(seconds / TTFT_RUNS * len(trial) / first_s)
    prompt = prompt[: max(len(trial), room)]
    times = []
    budget_s = float(context.parameter("budget_s"))
    for number in range(TTFT_RUNS):
        done = time.monotonic() - began
        context.progress(done, budget_s, f"first token, run {number + 1}")
        times.append(_time_to_token(decoder, prompt))
    ttft_s = float(np.median(times))
    return {
        "prompt_tokens": len(prompt),
        "ttft_s": ttft_s,
        "first_s": first_s,
        "tokens_per_s": len(prompt) / ttft_s,
    }


def _time_to_token(decoder: Decoder, prompt: Tokens) -> float:
    decoder.reset()
    begin = time.perf_counter()
    int(np.argmax(decoder.advance(prompt)))
    return time.perf_counter() - begin


def fill(
    decoder: Decoder, tokens: Tokens, context: JobContext, budget_s: float, began: float
) -> dict[str, Any]:
    """Prefill `tokens` in chunks; seconds of each chunk."""
    decoder.reset()
    seconds, sizes = [], []
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        begin = time.perf_counter()
        decoder.advance(part)
        seconds.append(time.perf_counter() - begin)
        sizes.append(len(part))
        context.progress(
            time.monotonic() - began, budget_s, f"filling the cache: {decoder.position} positions"
        )
    return {
        "tokens": len(tokens),
        "seconds": seconds,
        "chunks": sizes,
        "tokens_per_s": len(tokens) / sum(seconds),
    }


def sample_costs(decoder: Decoder, tokens: Tokens, reached: int) -> list[float]:
    """Seconds of a few tokens at both ends. Leaves the cache as it was."""
    costs = []
    for length in (SHORTEST, SHORTEST + 1, reached - 2, reached - 1):
        move_to(decoder, length)
        begin = time.perf_counter()
        decoder.advance(tokens[length : length + 1])
        costs.append(time.perf_counter() - begin)
    move_to(decoder, reached)
    return costs


def move_to(decoder: Decoder, position: int) -> None:
    """Continue at `position`. Later slots keep the fixed sequence, so going up again is valid."""
    decoder.seek(position)


def plan_points(
    reached: int,
    fixed: Any,
    sweeps: int,
    cost_s: float,
    left_s: float,
    seed: int,
) -> Schedule:
    """As many tokens at as many lengths as `left_s` allows, in a shuffled order for each sweep.

    `cost_s` is the mean time of a token. At least FEWEST_POINTS × FEWEST_TOKENS are measured even
    where that takes longer.
    """
    affordable = max(0.0, left_s) / cost_s / sweeps  # tokens in one sweep
    if fixed is not None:
        lengths = np.array(sorted({int(length) for length in fixed}), np.int64)
        if not len(lengths) or lengths[0] < 1 or lengths[-1] >= reached:
            raise JobError(
                f"curve: lengths are {lengths.tolist()}, expected numbers from 1 to {reached - 1}"
            )
        count = int(affordable // max(1, len(lengths)))
    else:
        points = int(np.clip(affordable // FEWEST_TOKENS, FEWEST_POINTS, MOST_POINTS))
        count = int(affordable // points)
    count = int(np.clip(count, FEWEST_TOKENS, MOST_TOKENS))
    if fixed is None:
        last = max(SHORTEST, reached - count)
        lengths = np.unique(np.linspace(SHORTEST, last, points).astype(np.int64))
    generator = np.random.Generator(np.random.Philox(key=seed))
    orders = np.array([generator.permutation(len(lengths)) for _ in range(sweeps)], np.int64)
    return Schedule(lengths, count, orders)


def sweep(
    decoder: Decoder,
    tokens: Tokens,
    schedule: Schedule,
    context: JobContext,
    budget_s: float,
    began: float,
) -> dict[str, Any]:
    """Every token of every point, raw: sweep, order, point's length, position, start and ns."""
    reached = decoder.position
    rows = []
    for number, order in enumerate(schedule.orders):
        for place, index in enumerate(order):
            length = int(schedule.lengths[index])
            move_to(decoder, length)
            for position in range(length, min(length + schedule.tokens_per_point, reached)):
                fed = tokens[position : position + 1]
                start = time.monotonic_ns()
                decoder.advance(fed)
                rows.append((number, place, length, position, start, time.monotonic_ns() - start))
            context.progress(
                time.monotonic() - began, budget_s, f"sweep {number + 1}, length {length}"
            )
    table = np.array(rows, np.int64)
    names = ("sweep", "order", "length", "position", "start_ns", "duration_ns")
    columns: dict[str, Any] = {name: table[:, index] for index, name in enumerate(names)}
    columns["run_started_ns"] = np.array(context.run_started_ns, np.int64)
    return columns
