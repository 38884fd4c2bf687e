"""Where the time of a step goes: ops put together by what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def by_kind(ops: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """ops: `op` (an id), `kinds` of its parts, `seconds` → groups of the same op in all layers,
    most expensive first: `ops` names the group, `ms` and `share` of the whole step."""
    total = sum(float(item["seconds"]) for item in ops)
    groups: dict[str, float] = {}
    for item in ops:
        head, _, rest = str(item["op"]).partition(".")
        layered = head[:1] == "L" and head[1:].isdigit()
        group = f"{rest} of all layers" if layered else str(item["op"])
        groups[group] = groups.get(group, 0.0) + float(item["seconds"])
    order = sorted(groups, key=lambda group: -groups[group])
    return [
        {"ops": group, "ms": 1e3 * groups[group], "share": groups[group] / total if total else 0.0}
        for group in order
    ]


def attention_seconds(ops: Sequence[Mapping[str, Any]]) -> float:
    """The ops that attend, whatever is fused with them."""
    return sum(float(item["seconds"]) for item in ops if "attention" in item["kinds"])
