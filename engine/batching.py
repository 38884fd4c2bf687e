"""Several sequences at once: every step decodes one token of each in one run of the program.

Weights are read once for all of them, which is what makes a batch worth while. Each sequence has a
region of the cache's slots; it stops by itself, and its region goes to the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.decode import PREFILL_TOKENS, Decoder, GenerationResult, TokenEvent
from engine.package import Package
from engine.runtime.state import ContextFull, NonFinite, step_inputs
from engine.sampling import Sampling, choose

__all__ = ["BatchDecoder", "BatchSequence", "Request", "generate_batch"]

BUCKET_SPREAD = 1.25
Tokens = npt.NDArray[np.int64]


class BatchSequence:
    """One sequence of a batch: its tokens so far, and why it ended."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_new: int,
        stop_ids: Collection[int],
        cancel: Callable[[], bool] | None,
        region: int,
    ) -> None:
        self.prompt = tuple(int(token) for token in prompt)
        self.sampling, self.max_new = sampling, max_new
        self.stop_ids, self.cancel = frozenset(stop_ids), cancel
        self.region = region
        self.position = 0  # tokens of it that are in the cache
        self.tokens: list[int] = []
        self.t_ns: list[int] = []
        self.started_ns = time.monotonic_ns()
        self.finish: str | None = None  # None: live
        self.error: NonFinite | None = None  # of finish "failed"

    @property
    def next_token(self) -> int:
        """What the next step feeds: the newest token, which is not in the cache yet."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def result(self) -> GenerationResult:
        """Raises RuntimeError while tokens are still to come."""
        if self.finish is None:
            raise RuntimeError("the sequence is not finished: step the batch first")
        return GenerationResult(
            tuple(self.tokens), self.finish, len(self.prompt), self.started_ns, tuple(self.t_ns)
        )


class BatchDecoder:
    """A model with up to `sequences` sequences of `context` tokens each in its KV cache.

    `buckets`: attention computes sequences together whose lengths differ by at most this ratio; 0
    pads all to the longest. `options` are those of `Decoder`: unit, executor, keep and so on.
    """

    def __init__(
        self,
        package: Package,
        *,
        sequences: int,
        context: int | None = None,
        buckets: float = BUCKET_SPREAD,
        **options: Any,
    ) -> None:
        if sequences < 1:
            raise ValueError(f"a batch of {sequences} sequences was asked for, expected at least 1")
        self.decoder = Decoder(
            package, context=context, sequences=sequences, buckets=buckets, **options
        )
        self.context, self.sequences = self.decoder.context, sequences
        self._free = deque(range(sequences))
        self._live: list[BatchSequence] = []

    @property
    def live(self) -> tuple[BatchSequence, ...]:
        """Sequences with tokens still to come."""
        return tuple(self._live)

    @property
    def free(self) -> int:
        """How many sequences can be added now."""
        return len(self._free)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: Collection[int] = (),
        cancel: Callable[[], bool] | None = None,
    ) -> BatchSequence:
        """A new sequence, whose prompt but the last token is read now.

        Raises ValueError for an empty prompt, an impossible token or `max_new`, ContextFull for a
        prompt that does not fit, RuntimeError when all regions are taken, NonFinite for bad
        numbers. None of them touches the other sequences.
        """
        if not len(prompt):
            raise ValueError("the prompt has no tokens; give at least the BOS token")
        if max_new < 1:
            raise ValueError(f"max_new is {max_new}, expected at least 1")
        self._require_vocabulary(prompt)
        self.decoder.places.require_room(0, len(prompt))
        if not self._free:
            raise RuntimeError(
                f"all {self.sequences} sequences of the batch are live; step until one has ended"
            )
        sequence = BatchSequence(
            prompt, sampling or Sampling(), max_new, stop_ids, cancel, self._free[0]
        )
        self._prefill(sequence)
        self._free.popleft()
        self._live.append(sequence)
        return sequence

    def step(self) -> list[tuple[BatchSequence, TokenEvent]]:
        """One token of every live sequence, in one run of the program; empty when none is live.

        A sequence that meets bad numbers ends as "failed" with its `error`; the others go on.
        """
        for sequence in self.live:
            if sequence.cancel is not None and sequence.cancel():
                self.end(sequence, "cancelled")
        # Similar lengths side by side, for attention; equal ones in the order they were added.
        batch = sorted(self._live, key=lambda sequence: sequence.position)
        events = []
        for sequence, logits in self._logits(batch):
            penalised = sequence.sampling.repetition_penalty != 1.0
            seen = [*sequence.prompt, *sequence.tokens] if penalised else ()
            token = choose(logits, sequence.sampling, len(sequence.tokens), seen)
            now = time.monotonic_ns()
            sequence.tokens.append(token)
            sequence.t_ns.append(now)
            if token in sequence.stop_ids:
                self.end(sequence, "stop")
            elif len(sequence.tokens) == sequence.max_new or self._full(sequence):
                self.end(sequence, "length")
            events.append((sequence, TokenEvent(token, len(sequence.tokens) - 1, now)))
        return events

    def end(self, sequence: BatchSequence, finish: str = "cancelled") -> None:
        """End a live sequence now; its region is free for the next. Nothing if it has ended."""
        if sequence.finish is None:
            sequence.finish = finish
            self._live.remove(sequence)
            self._free.append(sequence.region)

    def close(self) -> None:
        """End what threads the executor has; the batch is of no use afterwards."""
        self.decoder.executor.close()

    def _full(self, sequence: BatchSequence) -> bool:
        return self.decoder.places.keep is None and sequence.position >= self.context

    def _require_vocabulary(self, prompt: Sequence[int]) -> None:
        vocab = self.decoder.hyperparameters.vocab
        bad = [token for token in prompt if not 0 <= token < vocab]
        if bad:
            raise ValueError(f"token {bad[0]} is outside the vocabulary of {vocab}")

    def _prefill(self, sequence: BatchSequence) -> None:
        """All of the prompt but its last token, which the next step feeds."""
        tokens = np.asarray(sequence.prompt[:-1], np.int64)
        places = self.decoder.places
        for start, stop in places.pieces(0, tokens.size, PREFILL_TOKENS):
            positions = np.arange(start, stop)
            given = places.inputs(positions, self._start(sequence))
            self.decoder.run(
                step_inputs(tokens[start:stop], positions, [stop - start - 1], **given)
            )
            sequence.position = stop

    def _logits(
        self, batch: Sequence[BatchSequence]
    ) -> list[tuple[BatchSequence, npt.NDArray[np.float32]]]:
        """The logits (V,) of each; without those that fail when they are run alone."""
        if not batch:
            return []
        try:
            logits = self._run(batch)
        except NonFinite as error:
            if len(batch) == 1:
                batch[0].error = error
                self.end(batch[0], "failed")
                return []
            # Whose numbers are bad is seen alone. The others write the same slots once more.
            return [found for sequence in batch for found in self._logits([sequence])]
        for sequence in batch:
            sequence.position += 1
        return list(zip(batch, logits))

    def _run(self, batch: Sequence[BatchSequence]) -> npt.NDArray[np.float32]:
        """One step of `batch`: logits (T, V), a row for each."""
        positions = np.array([sequence.position for sequence in batch], np.int64)
        starts = np.array([self._start(sequence) for sequence in batch], np.int64)
        tokens = [sequence.next_token for sequence in batch]
        given = self.decoder.places.inputs(positions, starts)
        return self.decoder.run(step_inputs(tokens, positions, np.arange(len(batch)), **given))

    def _start(self, sequence: BatchSequence) -> int:
        return sequence.region * self.decoder.cache.slots


class Request:
    """A prompt and how to continue it; the arguments of `BatchDecoder.add`."""

    def __init__(self, prompt: Sequence[int], **arguments: Any) -> None:
        self.prompt, self.arguments = prompt, arguments


def generate_batch(
    batch: BatchDecoder, requests: Sequence[Request]
) -> list[GenerationResult | Exception]:
    """Results of all requests in their order; more than fit wait for a region.

    A request that cannot be run gives its error in place of a result, and disturbs no other.
    """
    waiting = deque(enumerate(requests))
    running: dict[int, BatchSequence] = {}
    results: dict[int, GenerationResult | Exception] = {}
    while waiting or batch.live:
        while waiting and batch.free:
            index, request = waiting.popleft()
            try:
                running[index] = batch.add(request.prompt, **request.arguments)
            except (ValueError, ContextFull, NonFinite) as error:
                results[index] = error
        batch.step()
    for index, sequence in running.items():
        results[index] = sequence.error or sequence.result
    return [results[index] for index in range(len(requests))]
