"""What `harness align` tells people: the verdict first, then what it rests on, a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.verdicts import Outcome

if TYPE_CHECKING:
    from harness.farm.results import CampaignResult, StageResult

# What was looked at → the check's name, in the order of the algorithm.
LINES = {
    "repeats": "repeatable",
    "taps": "taps_harmless",
    "complete": "complete",
    "finite": "finite",
    "local": "ops_local",
    "prefill": "ops_prefill",
    "free": "free_drift",
    "cache": "cache_undisturbed",
    "cosine": "min_cosine",
    "KL": "mean_kl",
    "top-1": "top1",
    "text": "text",
}
COLUMNS = ("op", "mode", "cosine", "rel L2", "naive", "worst row", "int8 steps", "outcome")
_ORDER = {"fail": 0, "invalid": 1, "warn": 2}


def report(result: CampaignResult, *, worst: int = 0) -> Iterator[str]:
    """Lines for each board; with `worst` so many ops with the largest errors behind them."""
    several = False
    for row in result.results.values():
        for item in row.values():
            if several:
                yield ""
            several = True
            yield from _one(item, worst)
    for sentence in result.left_behind:
        yield f"left behind on {sentence}"


def _one(item: StageResult, worst: int) -> Iterator[str]:
    verdict, details = item.verdict, item.verdict.details
    kind = f" ({item.error_kind})" if item.error_kind else ""
    yield f"{item.board} {item.outcome.value.upper()}{kind}: {verdict.headline}"
    checks = {check.name: check for check in verdict.checks}
    known = [name for name in LINES.values() if name in checks]
    words = {name: word for word, name in LINES.items()}
    for check in [*(checks[name] for name in known), *verdict.checks]:
        if check.name in checks:
            del checks[check.name]
            mark = "" if check.outcome in (Outcome.PASS, Outcome.BLOCKED) else "! "
            yield f"  {words.get(check.name, check.name):<9} {mark}{check.sentence}"
    more = _more(details)
    if more:
        yield f"  {'':<9} {more}"
    if verdict.culprit:
        yield f"  first wrong op: {verdict.culprit}"
    if verdict.remedy:
        yield f"  next: {verdict.remedy}"
    ops = details.get("ops") or ()
    if worst and ops:
        yield from table(worst_ops(ops, worst))


def _more(details: Mapping[str, Any]) -> str:
    """What no check says: the tail of the divergence, and how much a text repeats itself."""
    words = []
    logits, text = details.get("logits") or {}, details.get("text") or {}
    if logits.get("positions"):
        low, high = logits.get("p99_kl_low"), logits.get("p99_kl_high")
        interval = f" ({low:.2g} to {high:.2g})" if low is not None and high is not None else ""
        words.append(f"99th percentile of KL {logits['p99_kl']:.2g}{interval}")
    if text.get("tokens"):
        words.append(f"{text['repetition_rate']:.0%} of the text's four-token sequences repeat")
    return "; ".join(words)


def worst_ops(ops: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Those that did not pass, then those with the largest error in a row: at most `count`."""

    def rank(op: Mapping[str, Any]) -> tuple[int, float]:
        error = op["worst_row_rel_l2"]
        return _ORDER.get(op["outcome"], 9), -(error if error is not None else float("inf"))

    return sorted(ops, key=rank)[:count]


def table(ops: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The numbers of some ops in columns."""
    rows = [COLUMNS, *(_cells(op) for op in ops)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = "  ".join(
            cell.rjust(width) for cell, width in zip(row[2:-1], widths[2:-1], strict=True)
        )
        yield f"  {left}  {right}  {row[-1]}".rstrip()


def _cells(op: Mapping[str, Any]) -> tuple[str, ...]:
    cosine = op["cosine"]
    return (
        op["op"],
        op["mode"],
        "–" if cosine is None else f"{cosine:.6f}",
        _number(op["rel_l2"]),
        _number(op["base_rel_l2"]),
        _number(op["worst_row_rel_l2"]),
        _number(op.get("int8_steps")),
        op["outcome"],
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
