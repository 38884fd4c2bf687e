"""Our engine behind the protocol: the twin of `llama_worker`, with taps on what only ours has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.batching import BatchDecoder, BatchSequence
from engine.decode import Decoder, generate
from engine.native.library import load
from engine.options import EngineOptions
from engine.package import Package
from engine.program.ops import Op
from engine.runtime.trace import Trace

from .predictions import told
from .protocol import serve

TRACE_OPS = 1 << 16

PACKAGES: dict[str, Package] = {}
DECODERS: dict[str, Decoder] = {}
TRACES: dict[str, Trace] = {}
BATCHES: dict[str, BatchDecoder] = {}
SEQUENCES: dict[str, list[BatchSequence]] = {}


def open_session(
    session: str,
    package: str,
    options: Mapping[str, Any],
    context: int,
    trace: bool = False,
) -> dict[str, Any]:
    """Times what loading costs; tells what the ratios need and what ran."""
    begin = time.perf_counter()
    if package not in PACKAGES:
        PACKAGES[package] = Package.open(package)
    chosen = EngineOptions.from_mapping(options)
    recorder = Trace(TRACE_OPS) if trace else None
    decoder = Decoder(PACKAGES[package], options=chosen, context=context, trace=recorder)
    DECODERS[session] = decoder
    if recorder is not None:
        TRACES[session] = recorder
    return {
        "seconds": time.perf_counter() - begin,
        "weight_bytes": decoder.weight_bytes,
        "kv_bytes_per_position": decoder.kv_bytes_per_position,
        "options": chosen.to_mapping(),
        "unit": decoder.unit.name,
    }


def close_session(session: str) -> dict[str, Any]:
    DECODERS.pop(session).close()
    TRACES.pop(session, None)
    return {}


def truncate(session: str, position: int) -> dict[str, Any]:
    decoder = DECODERS[session]
    decoder.truncate(position) if position else decoder.reset()
    return {}


def feed(session: str, tokens: list[int]) -> dict[str, Any]:
    decoder, array = DECODERS[session], np.asarray(tokens, np.int64)
    begin = time.perf_counter()
    decoder.advance(array)
    return {"seconds": time.perf_counter() - begin, "position": decoder.position}


def decode(session: str, tokens: list[int]) -> dict[str, Any]:
    decoder, seconds = DECODERS[session], []
    for token in tokens:
        one = np.array([token], np.int64)
        begin = time.perf_counter()
        decoder.advance(one)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds}


def check(session: str, tokens: list[int], ids: list[list[int]], mode: str) -> dict[str, Any]:
    decoder, array = DECODERS[session], np.asarray(tokens, np.int64)
    if mode == "prefill":
        logits = decoder.advance(array, all_logits=True)
    else:
        logits = np.stack([decoder.advance(array[i : i + 1]).copy() for i in range(len(array))])
    return told(logits, ids)


def greedy(session: str, prompt: list[int], count: int) -> dict[str, Any]:
    decoder = DECODERS[session]
    decoder.reset()
    tokens = [int(event.token) for event in generate(decoder, prompt, max_new=count)]
    decoder.reset()
    return {"tokens": tokens}


def profile(session: str, tokens: list[int], mode: str) -> dict[str, Any]:
    """Seconds of each op of the program, by the trace: when `tokens` are decoded ("decode"), the
    median of the steps; when they are fed ("prefill"), the sum. Kinds are those of its parts."""
    decoder, trace = DECODERS[session], TRACES[session]
    before = trace.recorded
    together = np.sum if mode == "prefill" else np.median
    feed(session, tokens) if mode == "prefill" else decode(session, tokens)
    rows = trace.rows()[-(trace.recorded - before) :]  # (n, 4): step, op, start, end in ns
    ops = decoder.program.ops
    found = []
    for index, op in enumerate(ops):
        own = rows[rows[:, 1] == index]
        if len(own):
            seconds = float(together(own[:, 3] - own[:, 2])) / 1e9
            kinds = [part.kind for part in op.parts]
            found.append({"op": op.id, "kinds": kinds, "seconds": seconds})
    return {"ops": found}


def warm_up(session: str) -> dict[str, Any]:
    begin = time.perf_counter()
    DECODERS[session].warm_up()
    return {"seconds": time.perf_counter() - begin}


def open_batch(
    session: str,
    package: str,
    options: Mapping[str, Any],
    context: int,
    prompts: list[list[int]],
    buckets: float,
    steps: int,
) -> dict[str, Any]:
    """A batch with all `prompts` read; `steps` is how many tokens of each may follow."""
    if package not in PACKAGES:
        PACKAGES[package] = Package.open(package)
    trace = Trace(TRACE_OPS)
    batch = BatchDecoder(
        PACKAGES[package],
        sequences=len(prompts),
        context=context,
        buckets=buckets,
        options=EngineOptions.from_mapping(options),
        trace=trace,
    )
    BATCHES[session], TRACES[session] = batch, trace
    SEQUENCES[session] = [batch.add(prompt, max_new=steps) for prompt in prompts]
    return {}


def step_batch(session: str, steps: int) -> dict[str, Any]:
    """Seconds of each step, seconds of its attention, and the tokens of each sequence so far."""
    batch, trace = BATCHES[session], TRACES[session]
    before, seconds = trace.recorded, []
    for _ in range(steps):
        begin = time.perf_counter()
        batch.step()
        seconds.append(time.perf_counter() - begin)
    attention = {index for index, op in enumerate(batch.decoder.program.ops) if attends(op)}
    rows = trace.rows()[-(trace.recorded - before) :]
    own = rows[np.isin(rows[:, 1], sorted(attention))]
    numbers = np.unique(rows[:, 0])
    inside = [
        float((own[own[:, 0] == step, 3] - own[own[:, 0] == step, 2]).sum()) / 1e9
        for step in numbers
    ]
    tokens = [list(sequence.tokens) for sequence in SEQUENCES[session]]
    return {"seconds": seconds, "attention": inside, "tokens": tokens}


def attends(op: Op) -> bool:
    return any(part.kind == "attention" for part in op.parts)


def bandwidth(
    threads: int, size: int, streams: int, prefetch: int, huge: bool, passes: int
) -> dict[str, Any]:
    """Bytes a second that so many threads read from a block of `size` bytes: the median of
    `passes` after a first one, which still writes back what was filled."""
    rates = load().read_rates(threads, size, streams, prefetch, huge, passes + 1)
    if not rates:
        raise RuntimeError(f"reading {size} bytes with {threads} threads failed")
    return {"bytes_per_s": 1e9 * statistics.median(rates[1:])}


def about() -> dict[str, Any]:
    """Which native library and kernels run here; raises where there is no library."""
    library = load()
    return {
        "kernels": library.choose().name,
        "library": library.path.name,
        "isas": list(library.isas),
    }


if __name__ == "__main__":
    serve(
        {
            "about": about,
            "open": open_session,
            "close": close_session,
            "truncate": truncate,
            "feed": feed,
            "decode": decode,
            "check": check,
            "greedy": greedy,
            "profile": profile,
            "warm_up": warm_up,
            "open_batch": open_batch,
            "step_batch": step_batch,
            "bandwidth": bandwidth,
        }
    )
