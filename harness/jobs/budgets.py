"""Numbers against a board's budget, and when no such number may be judged."""

from __future__ import annotations

from collections.abc import Sequence

from harness.verdicts import Check, Outcome


def at_least(name: str, value: float, limit: float | None, unit: str, what: str) -> Check:
    """`what` is a clause for the sentence, such as "12.3 tokens/s at 2048 positions"."""
    return _budget(name, value, limit, unit, what, "at least", limit is None or value >= limit)


def at_most(name: str, value: float, limit: float | None, unit: str, what: str) -> Check:
    return _budget(name, value, limit, unit, what, "at most", limit is None or value <= limit)


def memory_within(name: str, value_mb: float, known: bool, limit: float | None, what: str) -> Check:
    """Memory against its budget; without a single reading there is nothing to judge."""
    if known:
        return at_most(name, value_mb, limit, "MiB", what)
    return Check(
        name=name,
        outcome=Outcome.INVALID,
        measured="no reading",
        limit=limit,
        sentence="The board told no memory of the engine, so its budget was not judged.",
    )


def _budget(
    name: str, value: float, limit: float | None, unit: str, what: str, bound: str, good: bool
) -> Check:
    wanted = "the budget sets no limit" if limit is None else f"{bound} {limit:g} {unit}".rstrip()
    return Check(
        name=name,
        outcome=Outcome.PASS if good else Outcome.FAIL,
        measured=value,
        limit=limit,
        unit=unit,
        sentence=f"{what[0].upper()}{what[1:]}; {wanted}{'' if limit is None else ' wanted'}.",
    )


def gated(disturbed: str | None, checks: Sequence[Check]) -> list[Check]:
    """The timing checks, none of which may pass or fail when the board was disturbed."""
    if disturbed is None:
        return list(checks)
    return [
        check.model_copy(
            update={
                "outcome": Outcome.INVALID,
                "sentence": f"Not judged ({disturbed}): {check.sentence}",
            }
        )
        for check in checks
    ]
