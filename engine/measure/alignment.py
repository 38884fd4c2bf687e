"""Accuracy alignment, the board's part: what the engine computes, for the host to compare.

1. repeat: the same few decode steps five times; their hashes must be equal. When they are not, the
   same once more with one op after the other, which tells a race between ops from anything else.
2. taps: a run with taps and one without; their hashes must be equal, else the probe changes things.
3. free: the engine on its own outputs along a given text; logits of every position, and what every
   op wrote at some of them (`rows`).
4. local: every op alone as a single decode step, fed the reference's inputs at those rows.
5. prefill: every op alone on the last rows together, because several tokens at once often take
   other code than one does.
6. text: a greedy continuation of a chat prompt.
7. passages: the logits of further texts, so that an interval can be drawn over texts.

Inputs: `tokens` (N,) int64; `rows` (P,) positions, ascending; `prompt` (n,) int64;
`passages` (Q, N) int64 where further texts are wanted;
`buffer.NAME` (P, …) what the reference wrote at `rows`; `cache.NAME` (N, K, D) the reference's keys
and values.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import numpy.typing as npt

from engine.measure.context import JobContext
from engine.program.ops import Program
from engine.runtime.cache import KVCache
from engine.runtime.state import State, step_inputs
from engine.runtime.sync import NonFinite, SyncExecutor
from engine.runtime.trace import Taps

if TYPE_CHECKING:
    from engine.decode import Decoder
    from engine.units import Unit

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

REPEATS = 5
REPEAT_STEPS = 3
BUFFER = "buffer."  # prefix of the inputs that hold the reference's buffers
CACHE = "cache."


def run(context: JobContext) -> None:
    tokens, rows = context.require("tokens"), context.require("rows")
    decoder = context.decoder(context=int(context.parameter("context")))
    max_new = int(context.parameter("max_new"))
    passages = context.inputs.get("passages", np.zeros((0, 0), np.int64))  # (Q, N)
    stages = 6 + (1 if len(passages) else 0)
    context.progress(0, stages, "repeating a few steps")
    repeated = repeat(decoder, tokens)
    context.data("repeat", repeated)
    if len(set(repeated["hashes"])) > 1 and decoder.options.executor != "sync":
        context.data("repeat_in_order", repeat(one_after_the_other(decoder), tokens))

    context.progress(1, stages, "running the text, with and without taps")
    tapped = free_run(decoder, tokens, rows, taps=True)
    bare = free_run(decoder, tokens, rows, taps=False)
    context.data("taps", {"with": tapped.digest(), "without": bare.digest()})
    context.data("free", {"positions": len(tapped.logits), "stopped": tapped.stopped})
    if tapped.buffers:
        context.array("free", **tapped.buffers)
    context.array("logits", shifted=shifted(tapped.logits))

    context.progress(2, stages, "running every op on the reference's inputs")
    buffers = with_prefix(context.inputs, BUFFER)
    caches = with_prefix(context.inputs, CACHE)
    alone = (decoder.program, decoder.unit, decoder.cache, tokens, rows, buffers, caches)
    report = context.progress
    local = local_run(
        *alone,
        pieces=single_steps(rows),
        on_piece=lambda done: report(2 + done / len(rows), stages, "every op alone"),
    )
    context.data("local", {"disturbed": local.disturbed})
    context.array("local", **local.buffers)

    context.progress(3, stages, "running every op on several tokens at once")
    piece = last_piece(rows)
    if piece is not None:
        prefill = local_run(*alone, pieces=[piece])
        context.data("prefill", {"disturbed": prefill.disturbed})
        context.array("prefill", **prefill.buffers)

    context.progress(4, stages, f"writing {max_new} tokens")
    context.data("text", text_run(decoder, context, max_new, stages))

    for number, passage in enumerate(passages):
        context.progress(6 + number / len(passages), stages, "running further texts")
        told = free_run(decoder, passage, np.zeros(0, np.int64), taps=False)
        context.array(f"passage_{number}", shifted=shifted(told.logits))
        context.data("passage", {"positions": len(told.logits), "stopped": told.stopped})
    context.progress(stages, stages, "done")


def with_prefix(arrays: Mapping[str, Array], prefix: str) -> Arrays:
    return {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}


def one_after_the_other(decoder: Decoder) -> Decoder:
    """The same engine with the sync executor, on a short cache of its own."""
    from engine.decode import Decoder as Another

    options = dataclasses.replace(decoder.options, executor="sync")
    context = min(decoder.context, 8 + REPEAT_STEPS)
    return Another(decoder.package, options=options, context=context, with_unit=decoder.unit)


def digest(arrays: Sequence[Array]) -> str:
    """SHA-256 over the bytes of some arrays, in order."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return sha.hexdigest()


def repeat(decoder: Decoder, tokens: Array) -> dict[str, Any]:
    """Hashes of a short prefill and a few decode steps, done again from the start each time.

    Bad numbers that come back in the same op after the same outputs are the same result; which step
    of the process it was is left out, because that differs each time.
    """
    head = max(1, min(8, len(tokens) - REPEAT_STEPS))
    hashes = []
    for _ in range(REPEATS):
        decoder.reset()
        outputs = []
        try:
            outputs.append(decoder.advance(tokens[:head]).copy())
            for token in tokens[head : head + REPEAT_STEPS]:
                outputs.append(decoder.advance(np.array([token], np.int64)).copy())
        except NonFinite as error:
            hashes.append(f"not finite in {error.op} after {digest(outputs)}")
        else:
            hashes.append(digest(outputs))
    return {"hashes": hashes, "steps": REPEAT_STEPS, "prefill": head}


@dataclasses.dataclass
class FreeRun:
    """`logits` (n, V) of the first n positions; `buffers` name → (m, …) at the first m rows.

    n < N and m < P when the engine stopped at numbers that are not finite.
    """

    logits: npt.NDArray[np.floating]
    buffers: Arrays
    stopped: dict[str, Any] | None

    def digest(self) -> str:
        return digest([self.logits])


def free_run(decoder: Decoder, tokens: Array, rows: Array, *, taps: bool) -> FreeRun:
    """Teacher-forced along `tokens` (N,): single steps at `rows`, prefill in between."""
    decoder.reset()
    probe = Taps(None) if taps else None
    logits: list[Array] = []
    stopped = None
    try:
        for start, stop, single in segments(len(tokens), rows):
            part = np.asarray(tokens[start:stop], np.int64)
            out = decoder.advance(part, taps=probe if single else None, all_logits=True)
            logits.append(np.array(out).reshape(len(part), -1))
    except NonFinite as error:
        stopped = {"step": error.step, "op": error.op, "layer": error.layer, "message": str(error)}
    buffers = {} if probe is None else {name: probe.stacked(name) for name in probe.values}
    width = decoder.hyperparameters.vocab
    together = np.concatenate(logits) if logits else np.zeros((0, width), np.float32)
    return FreeRun(together, buffers, stopped)


def segments(count: int, rows: Array) -> list[tuple[int, int, bool]]:
    """(start, stop, is a single step at a row) covering 0..count in order."""
    found: list[tuple[int, int, bool]] = []
    at = 0
    for row in [int(row) for row in rows]:
        if at < row:
            found.append((at, row, False))
        found.append((row, row + 1, True))
        at = row + 1
    if at < count:
        found.append((at, count, False))
    return found


def shifted(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float16]:
    """(n, V) minus each row's maximum, as float16: finest where probabilities are large.

    Softmax does not change by the shift. At a distance d from the maximum the step is d · 2^-11, so
    a token of probability p moves by at most p · |ln p| / 2048: far below any divergence that is
    judged.
    """
    if not len(logits):
        return np.zeros(logits.shape, np.float16)
    below = logits - logits.max(axis=-1, keepdims=True)
    clipped: npt.NDArray[np.floating] = np.maximum(below, np.float32(-60000.0))
    return clipped.astype(np.float16)


def single_steps(rows: Array) -> list[tuple[int, int]]:
    """Each of the P rows as a piece of its own: (start, stop) into `rows`."""
    return [(index, index + 1) for index in range(len(rows))]


def last_piece(rows: Array) -> tuple[int, int] | None:
    """(start, P) of the consecutive positions at the end of `rows`; None when they are fewer than
    two, which is no prefill."""
    start = len(rows) - 1
    while start > 0 and rows[start - 1] == rows[start] - 1:
        start -= 1
    return (start, len(rows)) if len(rows) - start > 1 else None


@dataclasses.dataclass
class LocalRun:
    """`buffers` name → (rows of all pieces, …); `disturbed`: caches whose other slots an append
    changed."""

    buffers: Arrays
    disturbed: list[str]


def local_run(
    program: Program,
    unit: Unit,
    like: KVCache,
    tokens: Array,
    rows: Array,
    buffers: Mapping[str, Array],
    caches: Mapping[str, Array],
    *,
    pieces: Sequence[tuple[int, int]],
    on_piece: Callable[[int], None] | None = None,
) -> LocalRun:
    """Every op alone, fed what the reference computed. A piece (start, stop) of `rows`, which are
    consecutive positions there, is one step of stop − start tokens.

    Before an append the piece's slots hold zeros, afterwards what the reference put there, so that
    neither a missing nor a wrong append reaches another op. Slots beyond the piece stay zero. The
    caches have the precision and the layout of the cache `like`.
    """
    executor = SyncExecutor(program, unit)
    slots_wanted = len(tokens) + 1
    block = KVCache(
        like.shape.layers,
        slots_wanted,
        like.shape.kv_heads,
        like.shape.head_dim,
        scheme=like.scheme,
        layout=like.layout,
        dtype=unit.dtype,
    )
    state_caches = block.buffers()
    outputs: dict[str, list[Array]] = {}
    disturbed: set[str] = set()
    for done, (start, stop) in enumerate(pieces, 1):
        positions = np.asarray(rows[start:stop], np.int64)
        slots = slice(int(positions[0]), int(positions[-1]) + 1)
        for name, cache in state_caches.items():
            cache[: slots.start] = caches[name][: slots.start]
            cache[slots.start :] = 0
        given = step_inputs(tokens[slots], positions, np.arange(stop - start))
        for op in program.ops:
            state: State = {**given, **state_caches}
            for name in op.reads:
                if name not in state:
                    state[name] = buffers[name][start:stop].astype(unit.dtype)
            before = {name: state_caches[name].copy() for name in op.appends}
            executor.run_op(op, state)
            for name in op.writes:
                value = state[name][slots] if name in before else state[name]
                outputs.setdefault(name, []).append(value.copy())
            for name, old in before.items():
                cache = state_caches[name]
                cache[slots] = old[slots] = caches[name][slots]
                if not np.array_equal(cache, old):
                    disturbed.add(name)
                    cache[:] = old
        if on_piece is not None:
            on_piece(done)
    together = {name: np.concatenate(parts) for name, parts in outputs.items()}
    return LocalRun(together, sorted(disturbed))


def text_run(decoder: Decoder, context: JobContext, max_new: int, stages: int) -> dict[str, Any]:
    """A greedy continuation of `prompt`; a stop at bad numbers is part of the finding."""
    from engine.decode import generate
    from engine.sampling import Sampling

    decoder.reset()
    prompt = [int(token) for token in context.require("prompt")]
    stop_ids = [int(token) for token in context.spec.parameters.get("stop_ids", [])]
    generation = generate(decoder, prompt, sampling=Sampling(), max_new=max_new, stop_ids=stop_ids)
    tokens: list[int] = []
    try:
        for event in generation:
            tokens.append(int(event.token))
            if len(tokens) % 20 == 0:
                context.progress(4 + len(tokens) / max_new * 2, stages, "writing")
    except NonFinite as error:
        stopped = {"step": error.step, "op": error.op, "message": str(error)}
        return {"tokens": tokens, "finish": "not finite", "stopped": stopped}
    result = generation.result
    return {
        "tokens": tokens,
        "finish": result.finish,
        "stopped": None,
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
    }
