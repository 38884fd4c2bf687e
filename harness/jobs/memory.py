"""Does the model fit the board? Asked before anything of it is sent there.

A model that is larger than the budget or than the board is a finding about it (FAIL): whether this
model, in this scheme and at this context, runs on this board is what a bring-up asks, and a curve
that measured too much memory fails too. One that fits the board, only not beside what uses its
memory now, is trouble of the board (a BoardError, kind low-memory).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from engine.measure.memory import Limits, Need, exceeded, need, reserve_of, rows, sentence
from engine.package import Package
from harness.errors import BoardError
from harness.verdicts import Check, Outcome, Verdict

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.boards.facts import Facts
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board, Budget

REMEDIES = {
    "budget": "choose a shorter --context, a smaller scheme or --kv int8, or raise memory_mb",
    "memory": "choose a shorter --context, a smaller scheme or --kv int8, or a larger board",
    "data": "raise the limit (ulimit -d), or choose a shorter --context or --kv int8",
    "available": "end what uses the board's memory, or choose a shorter --context",
}


@dataclasses.dataclass(frozen=True)
class Extent:
    """The largest that a stage asks of the engine: `positions` in its cache, and `logits` rows of
    (V,) kept at once."""

    positions: int
    logits: int = 1


def need_of(model: PreparedModel, options: EngineOptions, extent: Extent) -> Need:
    """By the package's header; nothing else of it is read."""
    with Package.open(model.package) as package:
        weight_bytes = package.weight_bytes
    return need(
        model.hyperparameters, weight_bytes, options, extent.positions, logits=extent.logits
    )


def limits_of(facts: Facts, budget: Budget) -> Limits:
    """What the board told when it was probed."""
    if facts.memory_limit == "ulimit -d":
        return Limits(data=facts.memory_mb, budget=budget.memory_mb)
    memory = facts.memory_mb
    # A control group or a limit of ours lies inside of what the system has for itself.
    reserve = reserve_of(memory) if memory is not None and not facts.memory_limit else 0.0
    return Limits(memory, reserve, facts.available_mb, budget=budget.memory_mb)


def refusal(board: Board, facts: Facts, wanted: Need) -> Verdict | None:
    """None when the model fits; else why it cannot be run, with the table.

    Raises BoardError "low-memory" when it would fit, were nothing else on the board.
    """
    limits = limits_of(facts, board.budget)
    beyond = exceeded(wanted, limits)
    if not beyond:
        return None
    table = rows(wanted, limits)
    told = sentence(wanted, limits)
    parts = ", ".join(f"{what} {value:.0f}" for what, value in table)
    if beyond == ("available",):
        raise BoardError(
            board.name,
            "low-memory",
            f"{told} ({parts} MiB)",
            remedy=REMEDIES["available"],
        )
    allowed = {
        "budget": limits.budget,
        "memory": (limits.memory or 0.0) - limits.reserve,
        "data": limits.data,
    }[beyond[0]]
    return Verdict(
        outcome=Outcome.FAIL,
        headline=f"refused before loading: {told}"[:118],
        checks=(
            Check(
                name="memory_budget",
                outcome=Outcome.FAIL,
                measured=wanted.own if beyond[0] == "data" else wanted.total,
                limit=allowed,
                unit="MiB",
                sentence=f"{told[0].upper()}{told[1:]}: {parts} MiB.",
            ),
        ),
        remedy=REMEDIES[beyond[0]],
        details={"memory_table": [[what, value] for what, value in table]},
    )
