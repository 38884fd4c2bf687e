"""What the model should compute, worked out on the host once and kept by hash.

`aligned` runs one text through the reference unit in float64 (the truth) and float32 (the naive
implementation, whose error says what the arithmetic may cost). `checked_text` asks the reference
what it would have written at each position of a text that a board wrote: one batch forward instead
of hundreds of steps.

A reference is that of a `definition`: the engine options that change what is computed. Activations
in int8 and a KV cache of few bits belong to it, so that each op is compared with what it was asked
to do. What such a scheme loses shows when the engine runs on its own; that is judged against the
definition PLAIN, in floats throughout, with the scheme's own noise (`SchemeNoise`) as margin. The
key is the package, the definition, the tokens and the engine's sources, so a changed definition
makes new references. A file lock lets one caller compute while the others wait, and a
lock of the process keeps threads that want different references from computing side by side: each
may need as much memory as the model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import engine
from engine.decode import PREFILL_TOKENS, Decoder, generate, program_of
from engine.measure.alignment import BUFFER, CACHE, digest, with_prefix
from engine.options import EngineOptions
from engine.package import Package
from engine.program.ops import Op, Program
from engine.runtime.state import State, step_inputs
from engine.runtime.trace import Taps
from engine.sampling import Sampling
from engine.units.loading import FAULT_VARIABLE
from harness.deploy.cache import atomic_file, locked
from harness.errors import HarnessError
from harness.jobs.comparison import logit_drift
from harness.paths import cache_dir

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

PLAIN = EngineOptions(unit="reference")
REFERENCE, LOCAL, FREE = "reference.", "local.", "free."  # prefixes in the cached file
KEEP_FILES = 24
KEEP_S = 86400.0  # a file used within a day stays whatever their number
NEAR, FAR = 8, 64  # of the largest logits of a row: what may be chosen, and what depth compares
ROWS_AT_ONCE = 16  # of logits, when they are reduced: a float64 copy of all of them would be large

# Taken before a file's lock, so that no thread waits for it while others wait for its file;
# reentrant, because one reference may be made from another.
_computing = threading.RLock()


@functools.cache
def code_hash() -> str:
    """Hash of the engine's sources and of this module: what reference outputs depend on."""
    root = Path(engine.__file__).parent
    sha = hashlib.sha256()
    for path in [*sorted(root.rglob("*.py")), Path(__file__)]:
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def cached(kind: str, key: Sequence[Any], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of `make()`, from the cache when the same key was made before."""
    return _load(cached_file(kind, key, make))


def cached_file(kind: str, key: Sequence[Any], make: Callable[[], Arrays]) -> Path:
    """Path of an .npz with the arrays of `make()`; made once, even when many ask at once."""
    folder = cache_dir("references")
    name = hashlib.sha256(json.dumps([code_hash(), *key]).encode()).hexdigest()[:32]
    path = folder / f"{kind}-{name}.npz"
    if _in_use(path):
        return path
    with _computing, locked(folder / f".{kind}-{name}.lock"):
        if _in_use(path):  # made meanwhile
            return path
        arrays = make()
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub counts allow_pickle
    _prune(folder)
    return path


def _in_use(path: Path) -> bool:
    """Whether the file is there; if so, `_prune` is told that it is in use."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _load(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _prune(folder: Path) -> None:
    """Remove what has not been used for a day, the oldest first, down to KEEP_FILES."""
    files = []
    for path in folder.glob("*.npz"):
        try:
            files.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # pruned by somebody else meanwhile
            continue
    for mtime, path in sorted(files)[: max(0, len(files) - KEEP_FILES)]:
        if time.time() - mtime > KEEP_S:
            path.unlink(missing_ok=True)


def definition_of(options: EngineOptions) -> EngineOptions:
    """What `options` ask to be computed, on the reference unit: not how, nor how fast."""
    return dataclasses.replace(
        PLAIN,
        activations=options.activations,
        float_layers=options.float_layers if options.activations == "int8" else (),
        fused=options.fused,
        passes_off=options.passes_off,
        kv=options.kv,
        kv_layout="numpy" if options.kv == "f32" else "sd",
        keep=options.keep,
    )


def is_exact(definition: EngineOptions) -> bool:
    """Whether it only rounds as floats do: no scheme of few bits but the weights' own."""
    return (definition.activations, definition.kv) == (PLAIN.activations, PLAIN.kv)


def judging(definition: EngineOptions) -> EngineOptions:
    """The definition whose logits and text a free run is judged by."""
    return definition if is_exact(definition) else PLAIN


def decoder_of(
    package: Package, definition: EngineOptions, context: int, **unit_options: Any
) -> Decoder:
    """A decoder on the host. Raises HarnessError when a fault is planted in this very process."""
    if os.environ.get(FAULT_VARIABLE):
        raise HarnessError(
            f"{FAULT_VARIABLE} is set for the harness itself, so the reference would be wrong too",
            remedy="unset it; a board's fault belongs into its `environment` in devices.yaml",
        )
    return Decoder(package, options=definition, context=context, **unit_options)


def program_for(model: PreparedModel, definition: EngineOptions) -> Program:
    """The ops that a board with these options runs."""
    with Package.open(model.package) as package:
        return program_of(package, definition)


@dataclasses.dataclass(frozen=True)
class Aligned:
    """A text of N tokens. Buffers are (P, …) at `rows`: `reference` in float64; `local` and `free`
    what the naive implementation wrote, fed the reference's inputs and on its own. `noise` is the
    largest error of the naive implementation's logits, each row relative to its maximum, and
    `drift` that of a whole row, relative to its norm."""

    tokens: npt.NDArray[np.int64]  # (N,)
    rows: npt.NDArray[np.int64]  # (P,)
    logits: npt.NDArray[np.float32]  # (N, V) of the float64 run
    plain: npt.NDArray[np.float32]  # (N, V) of one in floats throughout
    reference: Arrays
    local: Arrays
    free: Arrays
    noise: float
    drift: float


def spread_rows(count: int, rows: int) -> npt.NDArray[np.int64]:
    """`rows` of `count` positions: the first two (where a decoder is most unusual), then the last
    ones (where attention is longest). The last are at least two, which make a prefill."""
    tail = max(2, rows - 2)
    last = np.arange(count - tail, count)
    first = np.arange(min(max(0, rows - tail), count))
    return np.unique(np.concatenate([first, last[last >= 0]])).astype(np.int64)


def aligned(model: PreparedModel, definition: EngineOptions, tokens: Array, rows: Array) -> Aligned:
    """Reference outputs along `tokens` (N,), every op at `rows` (P,)."""
    arrays = _aligned(model, definition, tokens, rows)
    return Aligned(
        arrays["tokens"],
        arrays["rows"],
        arrays["logits"],
        arrays["logits"] if is_exact(definition) else plain_logits(model, tokens),
        with_prefix(arrays, REFERENCE),
        with_prefix(arrays, LOCAL),
        with_prefix(arrays, FREE),
        float(arrays["noise"]),
        float(arrays["drift"]),
    )


def plain_logits(model: PreparedModel, tokens: Array) -> npt.NDArray[np.float32]:
    """(N, V) along `tokens` (N,), in floats throughout. In float32: that is finer by far than what
    a scheme of few bits, which is compared with it, can be."""
    tokens = np.asarray(tokens, np.int64)

    def make() -> Arrays:
        with Package.open(model.package) as package:
            decoder = decoder_of(package, PLAIN, len(tokens))
            return {"logits": decoder.advance(tokens, all_logits=True)}

    found: npt.NDArray[np.float32]
    found = cached("plain", [model.sha256, tokens.tolist()], make)["logits"]
    return found


def _aligned(model: PreparedModel, definition: EngineOptions, tokens: Array, rows: Array) -> Arrays:
    key = _key(model, definition, tokens, rows)
    return cached("aligned", key, lambda: _align(model, definition, tokens, rows))


def alignment_inputs(
    model: PreparedModel,
    definition: EngineOptions,
    tokens: Array,
    rows: Array,
    prompt: Sequence[int],
    passages: Array,
) -> Path:
    """The board's input file of the alignment job, the same for every board. `passages` (Q, N) may
    be none."""

    def make() -> Arrays:
        arrays = _aligned(model, definition, tokens, rows)
        program = program_for(model, definition)
        read = {name for op in program.ops for name in op.reads}
        found: Arrays = {"tokens": arrays["tokens"], "rows": arrays["rows"]}
        found["prompt"] = np.array(prompt, np.int64)
        if len(passages):
            found["passages"] = np.asarray(passages, np.int64)
        for name, value in with_prefix(arrays, REFERENCE).items():
            if name in read and name not in program.caches:
                found[BUFFER + name] = value.astype(np.float32)
        found.update({name: arrays[name] for name in arrays if name.startswith(CACHE)})
        return found

    further = np.asarray(passages).tolist()
    key = [*_key(model, definition, tokens, rows), list(map(int, prompt)), further]
    return cached_file("inputs", key, make)


def _key(model: PreparedModel, definition: EngineOptions, tokens: Array, rows: Array) -> list[Any]:
    texts = [np.asarray(tokens, np.int64), np.asarray(rows, np.int64)]
    return [model.sha256, definition.to_mapping(), digest(texts)]


def _align(model: PreparedModel, definition: EngineOptions, tokens: Array, rows: Array) -> Arrays:
    tokens, rows = np.asarray(tokens, np.int64), np.asarray(rows, np.int64)
    with Package.open(model.package) as package:
        exact = decoder_of(package, definition, len(tokens), dtype=np.float64)
        program = exact.program
        at_rows, logits = _forward(exact, tokens, rows)
        caches = {name: np.asarray(view) for name, view in exact.cache.buffers().items()}
        naive = decoder_of(package, definition, len(tokens), dtype=np.float32)
        drift, naive_logits = _forward(naive, tokens, rows)
        local = run_ops(naive, program, tokens, rows, at_rows, caches)
    found: Arrays = {"tokens": tokens, "rows": rows, "logits": logits}
    found["noise"] = np.array(logit_difference(logits, naive_logits))
    drifted = logit_drift(logits, naive_logits, 0.0)
    found["drift"] = np.array(0.0 if drifted is None else drifted.error)
    for name in program.caches:
        found[CACHE + name] = caches[name].astype(np.float32)
    for name in at_rows:
        found[REFERENCE + name] = at_rows[name]
        found[LOCAL + name] = local[name]
        found[FREE + name] = drift[name]
    return found


class RowTaps(Taps):
    """Taps that keep only some positions: all of them would be gigabytes for a large model."""

    def __init__(self, rows: Array) -> None:
        super().__init__(None)
        self._rows = rows

    def record(self, op: Op, state: State) -> None:
        wanted = np.isin(state["positions"], self._rows)
        for name in op.writes:
            value = state[name]
            value = value[state[op.slots][wanted]] if name in op.appends else value[wanted]
            self.values.setdefault(name, []).append(np.array(value))


def _forward(decoder: Decoder, tokens: Array, rows: Array) -> tuple[Arrays, Array]:
    """(P, …) at `rows` of everything that any op writes along `tokens`, and the logits (N, V) in
    float32."""
    taps = RowTaps(rows)
    logits = [
        decoder.advance(tokens[start : start + PREFILL_TOKENS], taps=taps, all_logits=True).astype(
            np.float32
        )
        for start in range(0, len(tokens), PREFILL_TOKENS)
    ]
    return {name: taps.stacked(name) for name in taps.values}, np.concatenate(logits)


def logit_difference(exact: Array, other: Array) -> float:
    """The largest difference of two (N, V) logit arrays, each row relative to its maximum."""
    largest = 0.0
    for start in range(0, len(exact), ROWS_AT_ONCE):
        a, b = (
            np.asarray(logits[start : start + ROWS_AT_ONCE], np.float64)
            for logits in (exact, other)
        )
        difference = (a - a.max(axis=-1, keepdims=True)) - (b - b.max(axis=-1, keepdims=True))
        largest = max(largest, float(np.abs(difference).max()))
    return largest


def run_ops(
    decoder: Decoder,
    program: Program,
    tokens: Array,
    rows: Array,
    at_rows: Arrays,
    caches: Arrays,
) -> Arrays:
    """Every op once on all rows together, fed the reference's inputs: the naive local error."""
    given = step_inputs(tokens[rows], rows, np.arange(len(rows), dtype=np.int64))
    found: Arrays = {}
    for op in program.ops:
        state: State = dict(given)
        for name in {*op.reads, *op.appends}:
            if name in program.caches:
                state[name] = _refilled(decoder, name, caches[name])
            elif name not in state:
                state[name] = at_rows[name].astype(decoder.unit.dtype)
        decoder.unit.execute(op, state)
        for name in op.writes:
            found[name] = np.array(state[name][rows] if name in program.caches else state[name])
    return found


def _refilled(decoder: Decoder, name: str, values: Array) -> Any:
    """The decoder's own cache with the reference's keys or values, encoded as it does."""
    view = decoder.cache.buffers()[name]
    view[:] = values
    return view


@dataclasses.dataclass(frozen=True)
class SchemeNoise:
    """How a scheme of few bits moves logits, and with them any two right implementations of it: an
    activation that lies between two codes falls to either, and what follows from that in thirty
    layers is as large as what the scheme loses. (30 layers, int8 activations: float32 against
    float64 give a KL of 0.0035, either of them against floats throughout 0.003.)

    `between` is the largest error of the difference of two logits, among the NEAR likeliest;
    `alone` that of one logit, among the FAR largest.
    """

    between: float
    alone: float


def scheme_noise(model: PreparedModel, definition: EngineOptions, tokens: Array) -> SchemeNoise:
    """Of the naive implementation along `tokens` (N,), against floats throughout."""

    def make() -> Arrays:
        with Package.open(model.package) as package:
            decoder = decoder_of(package, definition, len(tokens))
            moved = decoder.advance(tokens, all_logits=True)  # (N, V)
        plain = plain_logits(model, tokens)
        order = np.argsort(-plain, axis=-1)[:, :FAR]
        want = np.take_along_axis(plain, order, axis=-1).astype(np.float64)
        error = np.take_along_axis(moved, order, axis=-1) - want  # (N, FAR)
        between = np.abs(error[:, :NEAR] - error[:, :1]).max()
        return {"between": np.array(between), "alone": np.array(np.abs(error).max())}

    key = [model.sha256, definition.to_mapping(), np.asarray(tokens).tolist()]
    found = cached("scheme", key, make)
    return SchemeNoise(float(found["between"]), float(found["alone"]))


@dataclasses.dataclass(frozen=True)
class CheckedText:
    """What the reference thinks of a text of n tokens that followed a prompt."""

    best: npt.NDArray[np.int64]  # (n,) the reference's own greedy choice at each place
    deficit: npt.NDArray[np.float64]  # (n,) its best logit minus that of the token written: ≥ 0
    margin: npt.NDArray[np.float64]  # (n,) its best logit minus its second best

    @property
    def first_divergence(self) -> int | None:
        """Index of the first token that the reference would not have written."""
        wrong = np.flatnonzero(self.deficit > 0)
        return int(wrong[0]) if len(wrong) else None

    def first_beyond(self, limit: float) -> int | None:
        """Index of the first token that the reference puts more than `limit` below its own."""
        wrong = np.flatnonzero(self.deficit > limit)
        return int(wrong[0]) if len(wrong) else None


def _choice(logits: Array, token: int) -> tuple[int, float, float]:
    """(best token, its lead over `token`, its lead over the second best) of logits (V,)."""
    best = int(logits.argmax())
    second, first = (float(value) for value in np.partition(logits, -2)[-2:])
    return best, first - float(logits[token]), first - second


def checked_text(
    model: PreparedModel, definition: EngineOptions, prompt: Sequence[int], tokens: Sequence[int]
) -> CheckedText:
    """One batch forward of the naive reference over prompt and text. Needs at least one token."""

    def make() -> Arrays:
        whole = np.array([*prompt, *tokens], np.int64)[:-1]
        first = len(prompt) - 1  # the position whose logits choose the first token
        written = np.array(tokens, np.int64)
        parts = []
        with Package.open(model.package) as package:
            decoder = decoder_of(package, definition, len(whole))
            if first:
                decoder.advance(whole[:first])
            for start in range(0, len(written), PREFILL_TOKENS):
                piece = slice(first + start, first + start + PREFILL_TOKENS)
                logits = decoder.advance(whole[piece], all_logits=True)  # (n, V)
                parts += [
                    _choice(row, int(token))
                    for row, token in zip(logits, written[start:], strict=False)
                ]
        best, deficit, margin = zip(*parts, strict=True)
        return {
            "best": np.array(best, np.int64),
            "deficit": np.array(deficit, np.float64),
            "margin": np.array(margin, np.float64),
        }

    written = [list(map(int, prompt)), list(map(int, tokens))]
    arrays = cached("text", [model.sha256, definition.to_mapping(), *written], make)
    return CheckedText(arrays["best"], arrays["deficit"], arrays["margin"])


def continuation(model: PreparedModel, prompt: Sequence[int], count: int) -> list[int]:
    """A short greedy continuation on the host, by the packed unit: for showing, not for judging."""

    def make() -> Arrays:
        with Package.open(model.package) as package:
            context = min(len(prompt) + count, package.hyperparameters.context)
            decoder = decoder_of(package, EngineOptions(), context)
            written = [
                event.token
                for event in generate(decoder, prompt, sampling=Sampling(), max_new=count)
            ]
        return {"tokens": np.array(written, np.int64)}

    found = cached("continuation", [model.sha256, list(map(int, prompt)), count], make)
    return [int(token) for token in found["tokens"]]
