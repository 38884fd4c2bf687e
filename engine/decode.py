"""The decode loop: a decoder with its KV cache, and generation on top of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.architectures import family_named
from engine.options import EngineOptions
from engine.package import Package
from engine.program.ops import Program
from engine.program.passes import apply, int8_activations
from engine.runtime.base import Executor
from engine.runtime.cache import KVCache, with_buckets
from engine.runtime.ring import Places, require_relative, with_ring
from engine.runtime.state import ContextFull, State, step_inputs
from engine.runtime.sync import NonFinite, SyncExecutor
from engine.runtime.trace import Taps, Trace
from engine.sampling import Sampling, choose
from engine.units import Unit, load_unit

__all__ = ["ContextFull", "Decoder", "Generation", "GenerationResult", "NonFinite", "generate"]

# Prefill runs in pieces, so that activations stay within some 30 MB for small models.
PREFILL_TOKENS = 128


def program_of(
    package: Package, options: EngineOptions, *, buckets: float | None = None
) -> Program:
    """The decode step that these options run, on whatever unit: with a ring, length buckets, int8
    activations and fused ops where they ask for them. Raises ValueError for an unknown pass."""
    hp = package.hyperparameters
    program = family_named(hp.architecture).program(hp)
    if options.keep is not None:
        require_relative(hp)
        program = with_ring(program, options.keep)
    if buckets is not None:
        program = with_buckets(program, buckets)
    if options.activations == "int8":
        program = int8_activations(program, package, options.float_layers)
    if options.fused:
        program = apply(program, options.passes_off)
    return program


def unit_of(
    package: Package, options: EngineOptions, *, context: int | None = None, **more: Any
) -> Unit:
    """The unit that these options name. Threads, kernels and huge pages are the native one's."""
    if options.unit == "native":
        native = {
            "threads": options.threads or 1,
            "kernels": options.kernels,
            "huge_pages": options.huge_pages,
        }
        more = {**native, **more}
    unit = load_unit(options.unit, package, context=context, **more)
    asked_for = getattr(unit, "asked_for", None)  # the faulty one's: some faults have conditions
    if asked_for is not None:
        asked_for(options)
    return unit


class Decoder:
    """A model with one sequence in its KV cache.

    `options` say how it runs (default: what `unit` runs best with). `context` bounds positions
    (default: the model's own). With a `keep`, a full context goes on as a ring behind its first
    `keep` tokens (engine.runtime.ring). `sequences` are the regions of its cache, of which it uses
    the first itself (engine.batching uses all), and `buckets` how much longer than its shortest the
    longest may be that attention computes together. `unit_options` go to the unit, such as
    `dtype=np.float64` for the reference; `with_unit` is one that is loaded already.
    """

    def __init__(
        self,
        package: Package,
        *,
        options: EngineOptions | None = None,
        unit: str = "packed",
        context: int | None = None,
        keep: int | None = None,
        sequences: int = 1,
        buckets: float | None = None,
        trace: Trace | None = None,
        with_unit: Unit | None = None,
        **unit_options: Any,
    ) -> None:
        hp = package.hyperparameters
        if options is None:
            options = dataclasses.replace(EngineOptions.for_unit(unit), keep=keep)
        self.package, self.hyperparameters, self.options = package, hp, options
        self.context = hp.context if context is None else context
        if not 1 <= self.context <= hp.context:
            raise ValueError(f"context is {self.context}, expected 1 to the model's {hp.context}")
        self.unit = with_unit or unit_of(package, options, context=self.context, **unit_options)
        self.places = Places(self.context, options.keep)
        self.program = program_of(package, options, buckets=buckets)
        self.cache = KVCache(
            hp.layers,
            self.context,
            hp.kv_heads,
            hp.head_dim,
            scheme=options.kv,
            layout=options.kv_layout,
            sequences=sequences,
            dtype=self.unit.dtype,
        )
        rows = max(PREFILL_TOKENS, sequences)  # of one step, a batch's included
        self.executor = _executor(options, self.program, self.unit, trace, rows)
        self.position = 0
        self._caches = self.cache.buffers()

    def close(self) -> None:
        """End what threads the executor has; the decoder is of no use afterwards."""
        self.executor.close()

    def warm_up(self) -> None:
        """Read every page of the weights and run one step, so that a first token waits for neither
        disk nor memory. The cache must be empty: its first slot is written."""
        if self.position:
            raise ValueError(f"warm up before use: {self.position} positions are cached")
        touch = getattr(self.unit, "warm_up", None)
        if touch is not None:
            touch()
        step = self.executor.step
        self.advance(np.zeros(1, np.int64))
        self.position, self.executor.step = 0, step

    @property
    def full(self) -> bool:
        """Whether no further token fits; never with a ring."""
        return self.places.keep is None and self.position >= self.context

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return self.package.weight_bytes

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values that a step reads for each cached position."""
        return self.cache.bytes_per_position

    def advance(
        self,
        tokens: npt.NDArray[np.int64],
        *,
        taps: Taps | None = None,
        all_logits: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Append `tokens` (T,) and return the last one's logits (V,), or all of them (T, V).

        T = 1 is a decode step, T > 1 prefill. Raises ContextFull before anything is written,
        ValueError for a token outside the vocabulary, NonFinite naming the op.
        """
        tokens = np.asarray(tokens, np.int64)
        if tokens.ndim != 1 or not tokens.size:
            raise ValueError(
                f"tokens have shape {tokens.shape}, expected (T,) with T of at least 1"
            )
        vocab = self.hyperparameters.vocab
        if tokens.min() < 0 or tokens.max() >= vocab:
            bad = int(tokens[(tokens < 0) | (tokens >= vocab)][0])
            raise ValueError(f"token {bad} is outside the vocabulary of {vocab}")
        self.places.require_room(self.position, tokens.size)
        found = []
        for start, stop in self.places.pieces(self.position, tokens.size, PREFILL_TOKENS):
            piece, last = tokens[start:stop], stop == tokens.size
            rows = np.arange(piece.size) if all_logits else np.array([piece.size - 1])
            positions = np.arange(self.position, self.position + piece.size)
            inputs = step_inputs(piece, positions, rows, **self.places.inputs(positions))
            logits = self.run(inputs, taps)
            self.position += piece.size
            if all_logits or last:
                found.append(logits)
        return np.concatenate(found) if all_logits else found[-1][-1]

    def run(self, inputs: State, taps: Taps | None = None) -> npt.NDArray[np.float32]:
        """One step on `inputs` (engine.runtime.state.step_inputs) and the cache: logits (R, V).

        The decoder's own position stays: the caller says where everything lies.
        """
        return self.executor.run({**inputs, **self._caches}, taps)

    def seek(self, position: int) -> None:
        """Continue at `position`, which may lie above the current one.

        The caller vouches that the slots below hold what it wants there, as after a truncation
        whose later slots were written again with the same tokens.
        """
        if not 0 <= position <= self.context:
            raise ValueError(f"cannot seek to {position}, expected 0 to {self.context}")
        self.position = position

    def truncate(self, position: int) -> None:
        """Forget the positions from `position` on; their slots are written again later.

        Raises ValueError for a position beyond what is cached, and once a ring has overwritten
        what the remaining ones would see.
        """
        if not 0 <= position <= self.position:
            raise ValueError(f"cannot truncate to {position}: {self.position} positions are cached")
        if self.position > self.context and position != self.position:
            raise ValueError(
                f"cannot truncate to {position}: the ring of {self.context} slots has overwritten "
                f"{self.position - self.context} positions; reset the decoder instead"
            )
        self.position = position

    def reset(self) -> None:
        """Begin anew: an empty cache, and steps counted from 0."""
        self.position = 0
        self.executor.step = 0


def _executor(
    options: EngineOptions, program: Program, unit: Unit, trace: Trace | None, rows: int
) -> Executor:
    if options.executor == "compiled":
        from engine.runtime.compiled import CompiledExecutor  # needs the native library

        return CompiledExecutor(program, unit, trace, rows=rows)
    if options.executor == "async":
        from engine.runtime.async_ import AsyncExecutor, patience

        return AsyncExecutor(program, unit, trace=trace, deadline_s=patience())
    return SyncExecutor(program, unit, trace)


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One generated token; `t_ns` is CLOCK_MONOTONIC when it was chosen."""

    token: int
    index: int
    t_ns: int


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What a generation was. Times in seconds; ITL are the gaps between tokens.

    TPOT = (end to end − TTFT) / (N − 1), None for fewer than two tokens.
    """

    tokens: tuple[int, ...]
    finish: str  # "stop", "length" or "cancelled"
    prompt_tokens: int
    started_ns: int
    t_ns: tuple[int, ...]

    @property
    def ttft_s(self) -> float | None:
        return (self.t_ns[0] - self.started_ns) / 1e9 if self.t_ns else None

    @property
    def tpot_s(self) -> float | None:
        if len(self.t_ns) < 2:
            return None
        return (self.t_ns[-1] - self.t_ns[0]) / 1e9 / (len(self.t_ns) - 1)

    def itl_ms(self, percentile: float) -> float | None:
        """A percentile (0–100) of the inter-token latency in milliseconds."""
        if len(self.t_ns) < 2:
            return None
        return float(np.percentile(np.diff(np.asarray(self.t_ns)), percentile)) / 1e6


class Generation(Iterator[TokenEvent]):
    """An iterator over generated tokens; `result` is whole once it is exhausted or cancelled."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        sampling: Sampling,
        max_new: int,
        stop_ids: Collection[int],
        cancel: Callable[[], bool] | None,
    ) -> None:
        if not len(prompt):
            raise ValueError("the prompt has no tokens; give at least the BOS token")
        if max_new < 1:
            raise ValueError(f"max_new is {max_new}, expected at least 1")
        decoder.places.require_room(decoder.position, len(prompt))
        self._decoder, self._sampling, self._cancel = decoder, sampling, cancel
        self._prompt = np.asarray(prompt, np.int64)
        self._max_new, self._stop_ids = max_new, frozenset(stop_ids)
        self._tokens: list[int] = []
        self._t_ns: list[int] = []
        self._started_ns = time.monotonic_ns()
        self._finish: str | None = None

    def __next__(self) -> TokenEvent:
        if self._finish is None and self._cancel is not None and self._cancel():
            self._finish = "cancelled"
        if self._finish is not None:
            raise StopIteration
        fed = self._prompt if not self._tokens else np.array([self._tokens[-1]])
        logits = self._decoder.advance(fed)
        seen = [*self._prompt.tolist(), *self._tokens]
        penalised = seen if self._sampling.repetition_penalty != 1.0 else ()
        token = choose(logits, self._sampling, len(self._tokens), penalised)
        now = time.monotonic_ns()
        self._tokens.append(token)
        self._t_ns.append(now)
        if token in self._stop_ids:
            self._finish = "stop"
        elif len(self._tokens) == self._max_new or self._decoder.full:
            self._finish = "length"
        return TokenEvent(token, len(self._tokens) - 1, now)

    @property
    def result(self) -> GenerationResult:
        """Raises RuntimeError while tokens are still to come."""
        if self._finish is None:
            raise RuntimeError("the generation is not finished: iterate over it first")
        return GenerationResult(
            tuple(self._tokens),
            self._finish,
            len(self._prompt),
            self._started_ns,
            tuple(self._t_ns),
        )


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    sampling: Sampling | None = None,
    max_new: int,
    stop_ids: Collection[int] = (),
    cancel: Callable[[], bool] | None = None,
) -> Generation:
    """Continue from the decoder's position with `prompt`, then up to `max_new` tokens.

    Ends on any of `stop_ids` ("stop"), on `max_new` or a full context ("length"), or when `cancel`
    says so. The newest token is not in the cache yet: a next turn's prompt begins with it. Raises
    ContextFull for a prompt that does not fit, ValueError for an empty one.
    """
    chosen = sampling or Sampling()
    return Generation(decoder, prompt, chosen, max_new, stop_ids, cancel)
