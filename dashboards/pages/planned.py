"""The plan on the Bring-up page: what would fit the board, beside what was measured on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dashboards.charts import Table
from dashboards.data import Case
from engine.architectures import Hyperparameters
from engine.measure.memory import Limits
from engine.options import KV_SCHEMES as KNOWN_KV
from harness.boards.facts import memory_facts
from harness.inventory import Budget
from harness.jobs.memory import limits_of
from harness.planning import KV_SCHEMES, Own, Plan, Row, beyond_ceiling, make_plan
from harness.verdicts import Outcome

MOST_CONTEXT = 2048  # of a plan, where no curve tells which one was designed
_BELIEVED = (Outcome.PASS, Outcome.WARN, Outcome.FAIL)
COLUMNS = (
    "weights", "KV", "MiB", "fits", "longest context", "≤ tok/s, start", "≤ tok/s, end",
    "measured MiB", "measured, start", "measured, end",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    reason: str
    note: str
    table: Table


def section(case: Case) -> Section | None:
    """None where the model or the board's memory is not known."""
    try:
        hp = Hyperparameters.from_json(dict(case.hyperparameters))
    except (ValueError, TypeError):  # not stored, or of another version
        return None
    limits = _limits(case)
    if limits is None:
        return None
    curve = _details(case, "curve")
    context = int(curve.get("context") or min(hp.context, MOST_CONTEXT))
    rate = curve.get("bandwidth_gb_s") or _details(case, "profile").get("bandwidth_gb_s")
    size = curve.get("weight_bytes") or _details(case, "profile").get("weight_bytes")
    ran = _kv(case)
    plan = make_plan(
        hp,
        limits,
        context=min(context, hp.context),
        bandwidth_gb_s=rate,
        floor=_number(case.board.budget.get("min_tokens_per_s")),
        own=Own(case.scheme or "as it ran", int(size)) if size else None,
        kv_schemes=tuple(dict.fromkeys((*KV_SCHEMES, *([ran] if ran in KNOWN_KV else ())))),
    )
    rows = tuple(_row(row, case, curve, plan) for row in plan.rows)
    above = beyond_ceiling(plan, case.scheme or "as it ran", curve.get("tokens_per_s_start"))
    note = f"{_note(plan)} {above}".rstrip()
    return Section(plan.reason, note, Table("Plan", COLUMNS, rows))


def _row(row: Row, case: Case, curve: Mapping[str, Any], plan: Plan) -> tuple[object, ...]:
    ran = row.weights == (case.scheme or "as it ran") and row.kv == _kv(case)
    name = f"{row.weights} (first to try)" if row is plan.choice else row.weights
    measured: tuple[object, ...] = (None, None, None)
    if ran:
        keys = ("rss_peak_mb", "tokens_per_s_start", "tokens_per_s_end")
        measured = tuple(_rounded(curve.get(key)) for key in keys)
    return (
        name,
        row.kv,
        round(row.need.total, 1),
        "yes" if row.fits else f"no: {row.beyond}",
        row.longest,
        _rounded(row.ceiling_start),
        _rounded(row.ceiling_end),
        *measured,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _kv(case: Case) -> str | None:
    """The precision of keys and values that the curve ran with."""
    run = case.runs.get("curve")
    options = run.engine.get("engine") if run is not None else None
    return str(options.get("kv")) if isinstance(options, Mapping) else None


def _details(case: Case, stage: str) -> dict[str, Any]:
    """The numbers of a run that may be believed."""
    run = case.runs.get(stage)
    if run is None or run.outcome not in _BELIEVED:
        return {}
    names = (
        "context", "bandwidth_gb_s", "weight_bytes", "tokens_per_s_start", "tokens_per_s_end",
        "rss_peak_mb",
    )  # fmt: skip
    return {name: run.details[name] for name in names if run.details[name] is not None}


def _limits(case: Case) -> Limits | None:
    facts = memory_facts(case.newest.facts or case.board.facts)
    limits = dataclasses.replace(
        limits_of(facts, Budget()), budget=_number(case.board.budget.get("memory_mb"))
    )
    return limits if limits.memory is not None or limits.data is not None else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        return None
    return float(value)


def _note(plan: Plan) -> str:
    memory = plan.limits.memory if plan.limits.memory is not None else plan.limits.data
    words = f"MiB and the end at {plan.context} positions; the board has {memory:.0f} MiB"
    if plan.limits.budget is not None:
        words += f", the budget allows {plan.limits.budget:.0f}"
    if plan.bandwidth_gb_s is None:
        return words + ". How fast it reads memory was not measured: run the curve or a profile."
    return (
        f"{words}. Speeds are what {plan.bandwidth_gb_s:.3g} GB/s allow, the read rate measured "
        "on it; engines reach 60 to 90 % of that."
    )
