"""Many short decodes with some steps asynchronous: the board's part of the search for a race.

Questions come with the spec: `{"on": "all" | "none" | [ids], "delayed": "all" | [ids], "repeats"}`.
Each of its repeats is a trial: an empty cache, a prompt, some decode steps on given tokens. The
logits of every step are compared by hash with those of the sync executor, which the first run of a
search finds and the later ones are given. A question ends with its first trial that goes wrong.

Told: `steps`, what can be asynchronous, with the part of the board it runs on; `reference`, tokens
and hashes, or `unstable`, why there is none; `trial` for each trial, with its question's number.
Whoever reads this knows which trial a process died in: the one that would have been told next.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.measure.context import JobContext
from engine.program.conflicts import conflicts
from engine.program.happens_before import check
from engine.runtime.state import NonFinite
from engine.runtime.trace import Trace

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.decode import Decoder
    from engine.program.schedule import AsyncOps
    from engine.runtime.async_ import AsyncExecutor

NUMBERS, NON_FINITE = "wrong numbers", "non-finite numbers"  # signatures
REFERENCES = 3  # sync decodes of which two must agree
OVERLAPS = 8  # told of one trial
HAZARDS = ("RAW", "WAW", "WAR")  # of one pair the first is told


class Unstable(ArithmeticError):
    """The sync executor itself does not give the same numbers again."""


def run(context: JobContext) -> None:
    from engine.runtime.async_ import AsyncExecutor

    questions = context.parameter("questions")
    decoder = context.decoder(context=int(context.parameter("context")), executor="sync")
    steps = int(context.parameter("steps"))
    reference = context.spec.parameters.get("reference")
    if reference is None:
        try:
            reference = find_reference(decoder, context.parameter("prompt"), steps)
        except Unstable as error:
            context.data("unstable", str(error))
            return
    executor = AsyncExecutor(decoder.program, decoder.unit)
    parts = dict(zip((op.id for op in decoder.program.ops), executor.parts))
    findings = check(decoder.program, executor.schedule, executor.memory)
    context.data("steps", {"parts": parts, "findings": [str(found) for found in findings]})
    context.data("reference", reference)  # from here on, an error is that of a trial
    decoder.executor.close()
    decoder.executor = executor
    trials = Trials(decoder, executor, reference, float(context.parameter("delay_s")))
    try:
        for number, question in enumerate(questions):
            for repeat in range(int(question["repeats"])):
                told = trials.run(question)
                context.data("trial", {"question": number, "repeat": repeat, **told})
                if told["result"] != "pass":
                    break
            context.progress(number + 1, len(questions), "questions")
    finally:
        decoder.close()


def find_reference(decoder: Decoder, prompt: Sequence[int], steps: int) -> dict[str, Any]:
    """Tokens fed, greedily chosen, and the hash of each step's logits, as the sync executor has
    them. Raises Unstable when no two of three decodes agree: then nothing can be compared."""
    found: list[dict[str, Any]] = []
    for _ in range(REFERENCES):
        decoder.reset()
        fed, hashes = [[int(token) for token in prompt]], []
        for _ in range(steps):
            logits = decoder.advance(np.array(fed[-1], np.int64))
            hashes.append(hash_of(logits))
            fed.append([int(np.argmax(logits))])
        told = {"fed": fed[:-1], "hashes": hashes}
        if told in found:
            return told
        found.append(told)
    raise Unstable(f"everything synchronous, {REFERENCES} decodes gave {REFERENCES} results")


class Trials:
    """Trials on one decoder with an async executor."""

    def __init__(
        self,
        decoder: Decoder,
        executor: AsyncExecutor,
        reference: Mapping[str, Any],
        delay_s: float,
    ) -> None:
        self.decoder, self.executor, self.delay_s = decoder, executor, delay_s
        self._fed = [np.array(tokens, np.int64) for tokens in reference["fed"]]
        self._hashes = list(reference["hashes"])
        self._conflicts = conflicts(decoder.program, executor.memory)

    def run(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """One trial: how it ended, and which conflicting ops overlapped if it went wrong."""
        executor, decoder = self.executor, self.decoder
        on: AsyncOps = question["on"]
        delayed = question.get("delayed", ())
        ids = [op.id for op in decoder.program.ops] if delayed == "all" else delayed
        begin = time.perf_counter()
        executor.change(on, {op_id: self.delay_s for op_id in ids})
        executor.trace = Trace(len(decoder.program.ops) * (len(self._fed) + 1))
        decoder.reset()
        signature, step = None, None
        try:
            for step, tokens in enumerate(self._fed):
                if hash_of(decoder.advance(tokens)) != self._hashes[step]:
                    signature = NUMBERS
                    break
            executor.drain()  # an op that nobody waits for is to be in the trace as well
        except NonFinite:
            signature = NON_FINITE
        told: dict[str, Any] = {
            "result": "pass" if signature is None else "fail",
            "seconds": time.perf_counter() - begin,
        }
        if signature is not None:
            told.update(signature=signature, step=step, overlaps=self.overlaps())
        return told

    def overlaps(self) -> list[dict[str, Any]]:
        """Conflicting ops of which the second began before the first was over, as they came."""
        trace = self.executor.trace
        if trace is None:
            return []
        ids = [op.id for op in self.decoder.program.ops]
        times = {
            (ids[index], step): (int(start), int(end)) for step, index, start, end in trace.rows()
        }
        found: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
        for pair in sorted(self._conflicts, key=lambda one: HAZARDS.index(one.hazard)):
            for (act, step), (start, _) in times.items():
                before = times.get((pair.first, step - pair.steps))
                if act != pair.second or before is None or before[1] <= start:
                    continue
                told = {"first": pair.first, "second": act, "hazard": pair.hazard,
                        "buffer": pair.first_buffer, "as": pair.second_buffer}  # fmt: skip
                found.setdefault((pair.first, act), (start, told))
        ordered = sorted(found.values(), key=lambda item: item[0])
        return [told for _, told in ordered[:OVERLAPS]]


def hash_of(logits: npt.NDArray[np.float32]) -> str:
    """The first 16 hex digits of the SHA-256 over the logits' bytes."""
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]
