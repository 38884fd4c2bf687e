"""The engine was killed for memory, by somebody who said so: the kernel, a cgroup, a service.

Never by default: a SIGKILL without a record is `killed`, since phones and some boards kill large
processes by policy and say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.triage.case import memory_trend
from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "out-of-memory", 20, "Killed for memory"


def recognise(case: Case) -> Finding | None:
    if case.signal == "SIGKILL":
        return _killed(case)
    if case.error.get("kind") == "MemoryError":
        message = str(case.error.get("message", ""))
        return _finding(
            case,
            f"out of memory, said the engine itself: {message}",
            "MemoryError",
            (),
            "an allocation was refused",
        )
    return None


def _killed(case: Case) -> Finding | None:
    said = case.note("oom", "killed", "unit-oom")
    if said is not None:
        limited = "memcg" in said.detail.lower() or "memory cgroup" in said.detail.lower()
        who = "its cgroup's limit" if limited else "want of memory"
        return _finding(
            case,
            f"killed, and the kernel recorded that it was for {who}",
            "memory cgroup" if limited else said.kind.replace("killed", "oom"),
            (("record", said.line),),
            f"the record says: {said.line}",
        )
    kills = _cgroup_kills(case.evidence.get("cgroup"))
    if kills:
        return _finding(
            case,
            f"killed, and its memory cgroup counted {kills} kill(s) for its limit",
            "memory cgroup",
            (("memory.events oom_kill", f"+{kills}"),),
            "the counter of the cgroup that it ran in went up",
        )
    counted = case.exit.get("oom_kills")
    if type(counted) is int and counted > 0:
        return _finding(
            case,
            f"killed, and the kernel recorded {counted} kill(s) for want of memory on the board "
            "during the run",
            "oom",
            (("oom_kill of /proc/vmstat", f"+{counted}"),),
            "no line says whom, but an engine is the first to go (oom_score_adj 500)",
        )
    return None


def _cgroup_kills(told: Any) -> int:
    """How many kills the engine's cgroup counted during its life."""
    if not isinstance(told, Mapping):
        return 0
    counts = []
    for when in ("before", "after"):
        events = (
            (told.get(when) or {}).get("events") if isinstance(told.get(when), Mapping) else None
        )
        value = events.get("oom_kill") if isinstance(events, Mapping) else None
        counts.append(value if type(value) is int else None)
    before, after = counts
    return max(0, after - before) if before is not None and after is not None else 0


def _finding(
    case: Case, headline: str, kind: str, facts: tuple[tuple[str, str], ...], why: str
) -> Finding:
    trend = memory_trend(case.log.samples)
    return Finding(
        NAME,
        headline=headline,
        sentence=f"{headline}; {why}; {trend}",
        remedy="use a shorter context, a smaller KV scheme or a smaller model, or raise the limit; "
        "`harness bringup` refuses what the memory budget says does not fit",
        signal=case.signal,
        op=case.op,
        kind=kind,
        facts=(*facts, ("memory", trend), *memory_facts(case)),
    )


def memory_facts(case: Case) -> tuple[tuple[str, str], ...]:
    """What was seen of the process's memory and its limits last."""
    found: list[tuple[str, str]] = []
    process = case.evidence.get("process")
    if isinstance(process, Mapping):
        status = process.get("status")
        if isinstance(status, Mapping):
            parts = [f"{name} {value} kB" for name, value in status.items() if name != "Threads"]
            found.append(("process, last seen", ", ".join(parts)))
        if process.get("oom_score_adj") is not None:
            found.append(("oom_score_adj", str(process["oom_score_adj"])))
    group = case.evidence.get("cgroup")
    after = group.get("after") if isinstance(group, Mapping) else None
    if isinstance(after, Mapping):
        for name in (
            "memory.max",
            "memory.limit_in_bytes",
            "memory.peak",
            "memory.max_usage_in_bytes",
        ):
            if after.get(name):
                found.append((f"cgroup {name}", str(after[name])))
    pressure = case.evidence.get("pressure")
    if isinstance(pressure, (list, tuple)) and pressure:
        found.append(("memory pressure", str(pressure[-1])))
    return tuple(found)
