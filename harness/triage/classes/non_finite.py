"""NaN or infinity: where first, how many, over which range, and with which scale of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "non-finite", 50, "NaN or infinity"


def recognise(case: Case) -> Finding | None:
    error = case.error
    if error.get("kind") not in ("NonFinite", "CacheOverflow"):
        return None
    op, step = str(error.get("op") or "an unknown op"), error.get("step")
    told = error.get("evidence")
    told = told if isinstance(told, Mapping) else {}
    facts = [(str(name).replace("_", " "), _text(value)) for name, value in list(told.items())[:20]]
    layer = error.get("layer")
    where = f"{op}, layer {layer}" if layer is not None else op
    beside = "; ".join(f"{name} {value}" for name, value in facts)
    return Finding(
        NAME,
        headline=f"bad numbers (NaN or Inf) in {op} at step {step}",
        sentence=f"{error.get('message', '')} ({where})" + (f"; {beside}" if beside else ""),
        remedy=f"look at {op}: its inputs, its accumulation type, its weights' scales; "
        "`harness align` compares every op with the reference",
        op=str(error.get("op") or ""),
        kind=str(told.get("kind") or "not finite"),
        facts=(("op", where), ("step", str(step)), *facts),
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return " to ".join(_text(item) for item in value[:4])
    return str(value)[:300]
