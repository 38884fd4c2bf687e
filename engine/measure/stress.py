"""The stress stage, the board's part: dialogues that grow until the context is full, for minutes.

Some generations are cancelled, some turns are followed by idle time, and the supervisor kills this
process once in between: the next attempt goes on until the same end. Each turn is told at once with
the time of every token, so a killed engine loses nothing but its last turn. A golden generation
before, after and at the start of each attempt shows that answers have not changed.

Inputs: `dialogue.I.first` and `dialogue.I.later.J`, ids of user turns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from engine.measure.context import JobContext, JobError
from engine.measure.golden import golden

if TYPE_CHECKING:
    from engine.decode import Decoder

CANCEL_EVERY = 3  # turns; the second is the first
CANCEL_AFTER = 3  # tokens
IDLE_EVERY = 6  # turns
GOLDEN_EVERY_S = 300.0
SMALLEST = 128  # positions
FILLS = 4
GENERATED = 0.6


def run(context: JobContext) -> None:
    largest = int(context.parameter("context"))
    decoder = context.decoder(context=largest)
    told = golden(decoder, context, "before" if context.attempt == 0 else "restarted")
    size = largest
    if context.spec.parameters.get("may_shrink"):
        left_s = 60.0 * float(context.parameter("minutes")) - context.elapsed_s
        longest = max(len(first) for first, _ in read_dialogues(context))
        least = longest + int(context.parameter("max_new"))  # a first turn and its answer
        size = fitting_context(largest, told["tokens_per_s"], left_s, least)
        decoder = context.decoder(context=size)
    context.data("context", {"largest": largest, "used": size})
    Stress(decoder, context).run()
    golden(decoder, context, "after")


def fitting_context(largest: int, tokens_per_s: float, seconds: float, least: int = 0) -> int:
    """A context that dialogues fill FILLS times in `seconds`, so that its limit is really met.

    At least SMALLEST and `least` positions, where `largest` allows it.
    About GENERATED of a dialogue's positions are generated; the rest is prefilled, much faster.
    """
    positions = tokens_per_s * seconds / FILLS / GENERATED
    return min(largest, max(SMALLEST, least, int(positions) // 32 * 32))


class Stress:
    """One attempt: conversations one after the other until the run's time is over."""

    def __init__(self, decoder: Decoder, context: JobContext) -> None:
        self.decoder, self.context = decoder, context
        self.seconds = 60.0 * float(context.parameter("minutes"))
        self.max_new = int(context.parameter("max_new"))
        self.idle_s = float(context.parameter("idle_s"))
        self.stop_ids = [int(token) for token in context.spec.parameters.get("stop_ids", [])]
        self.dialogues = read_dialogues(context)
        self.turns = 0
        self.next_golden_s = context.elapsed_s + GOLDEN_EVERY_S

    @property
    def over(self) -> bool:
        return self.context.elapsed_s >= self.seconds

    def run(self) -> None:
        conversation = 0
        while not self.over:
            if self.context.elapsed_s >= self.next_golden_s:
                golden(self.decoder, self.context, "between")
                self.next_golden_s = self.context.elapsed_s + GOLDEN_EVERY_S
            self.converse(conversation)
            conversation += 1

    def converse(self, conversation: int) -> None:
        """One dialogue up to the context limit, or to the end of the run's time."""
        first, later = self.dialogues[conversation % len(self.dialogues)]
        self.decoder.reset()
        pending: list[int] = []  # the newest token is not in the cache yet
        turn = 0
        while not self.over:
            prompt = later[(turn - 1) % len(later)] if turn and later else first
            if pending and pending[0] == prompt[0] and pending[0] in self.stop_ids:
                pending = []  # the turn's own ids begin with the end mark
            told = self.turn(conversation, turn, [*pending, *prompt])
            if told["finish"] == "refused" and turn == 0:  # every dialogue would end so, at once
                raise JobError(
                    f"the first turn of dialogue {conversation % len(self.dialogues)} has "
                    f"{len(prompt)} tokens, the context {self.decoder.context}; "
                    "expected a context that holds a first turn and its answer"
                )
            full = self.decoder.position >= self.decoder.context
            if told["finish"] == "refused" or full:
                break
            pending = told["last"]
            turn += 1
            if self.turns % IDLE_EVERY == 0 and not self.over:
                self.context.data("idle", {"at_s": self.context.elapsed_s, "s": self.idle_s})
                time.sleep(self.idle_s)  # an idle gap is part of the load

    def turn(self, conversation: int, turn: int, prompt: list[int]) -> dict[str, Any]:
        """One answer, told when it ends. "refused": the prompt no longer fits the context."""
        from engine.decode import ContextFull, generate
        from engine.sampling import Sampling

        self.turns += 1
        planned = self.turns % CANCEL_EVERY == 2
        started_s = self.context.elapsed_s
        head = {
            "conversation": conversation,
            "turn": turn,
            "attempt": self.context.attempt,
            "prompt_tokens": len(prompt),
            "started_s": started_s,
        }
        self.context.data("turn-start", head)
        tokens: list[int] = []
        seed = self.context.spec.seed + self.turns
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=seed)
        try:
            generation = generate(
                self.decoder,
                prompt,
                sampling=sampling,
                max_new=self.max_new,
                stop_ids=self.stop_ids,
                cancel=lambda: self.over or (planned and len(tokens) >= CANCEL_AFTER),
            )
            for event in generation:
                tokens.append(int(event.token))
        except ContextFull as error:
            self.context.data(
                "turn",
                {**head, "finish": "refused", "new_tokens": 0, "message": str(error),
                 "cached_tokens": self.decoder.position, "ttft_s": None, "token_us": []},
            )  # fmt: skip
            return {"finish": "refused", "last": []}
        result = generation.result
        start_ns = result.started_ns
        self.context.data(
            "turn",
            {
                **head,
                "finish": result.finish,
                "planned_cancel": planned and result.finish == "cancelled",
                "new_tokens": len(tokens),
                "cached_tokens": self.decoder.position,
                "full": self.decoder.position >= self.decoder.context,
                "ttft_s": result.ttft_s,
                "tpot_s": result.tpot_s,
                "start_ns": start_ns,
                "token_us": [(t_ns - start_ns) // 1000 for t_ns in result.t_ns],
            },
        )
        self.context.progress(
            min(self.context.elapsed_s, self.seconds),
            self.seconds,
            f"turn {self.turns}, {self.decoder.position} of {self.decoder.context} positions",
        )
        return {"finish": result.finish, "last": tokens[-1:]}


def read_dialogues(context: JobContext) -> list[tuple[list[int], list[list[int]]]]:
    """(first turn, later turns) of each dialogue of the inputs."""
    found: list[tuple[list[int], list[list[int]]]] = []
    while f"dialogue.{len(found)}.first" in context.inputs:
        name = f"dialogue.{len(found)}"
        later: list[list[int]] = []
        while f"{name}.later.{len(later)}" in context.inputs:
            ids = context.inputs[f"{name}.later.{len(later)}"]
            later.append([int(token) for token in ids])
        found.append(([int(token) for token in context.inputs[f"{name}.first"]], later))
    if not found:
        context.require("dialogue.0.first")
    return found
