"""What ran: unit, executor, kernels, threads. A speed is that of these, or it is no speed.

A shape or a layout that the fast kernels cannot take falls back to a slow one, and gives right
numbers at a fraction of the speed. The `ready` event names it, and the speed gate fails by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.placement import Placement
from harness.verdicts import Check, Outcome

if TYPE_CHECKING:
    from harness.jobs.base import StageContext
    from harness.jobs.runlog import RunLog

# How the native unit tells of weights that miss its fast kernels.
_SLOW = re.compile(r"slow for (?P<what>\S+?)(?P<more> and \d+ more)?: (?P<why>.+)")


def fallbacks(ready: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what runs on a slow kernel, why), as the engine told when it was ready."""
    found = []
    kernels = ready.get("kernels")
    for kind, kernel in kernels.items() if isinstance(kernels, Mapping) else ():
        match = _SLOW.search(str(kernel))
        if match:
            found.append((f"{kind} {match['what']}{match['more'] or ''}", match["why"]))
    return found


def engine_words(ready: Mapping[str, Any]) -> str:
    """ "native unit, avx2 kernels, compiled, 4 threads on cores 4-7, f16 keys and values"."""
    options = ready.get("engine")
    options = options if isinstance(options, Mapping) else {}
    words = [f"{ready.get('unit', 'unknown')} unit"]
    native = ready.get("native")
    kernels = ready.get("kernels")
    if isinstance(native, Mapping):
        words.append(f"{native.get('isa')} kernels")
    elif isinstance(kernels, Mapping) and kernels.get("all"):
        words.append(str(kernels["all"]))
    if options.get("executor"):
        words.append(f"{options['executor']} executor")
    if isinstance(ready.get("threads"), int):
        cpus = ready.get("cpus")
        known = tuple(cpus) if isinstance(cpus, (list, tuple)) and cpus else None
        words.append(str(Placement(ready["threads"], known)))
    if options.get("activations") == "int8":
        words.append("int8 activations")
    if options.get("kv"):
        words.append(f"{options['kv']} keys and values")
    return ", ".join(words)


def judge_kernels(context: StageContext, log: RunLog) -> Check:
    """Did everything run on the kernels that it was meant for?"""
    ready = log.ready or {}
    slow = fallbacks(ready)
    if slow:
        what, why = slow[0]
        more = f" ({len(slow) - 1} more kinds of op likewise)" if len(slow) > 1 else ""
        outcome, measured = Outcome.FAIL, what
        sentence = f"A slow kernel ran: {what}: {why}{more}. No speed counts with it."
    elif context.engine.note:
        outcome, measured = Outcome.WARN, "numpy"
        sentence = f"Not the fast path: {context.engine.note}."
    else:
        outcome, measured = Outcome.PASS, engine_words(ready)
        sentence = f"Ran as meant: {measured}{_chosen(ready)}."
    return Check(
        name="kernels", outcome=outcome, measured=measured, limit="fast kernels", sentence=sentence
    )


def _chosen(ready: Mapping[str, Any]) -> str:
    """Why these kernels, where that is not a matter of course."""
    native = ready.get("native")
    reason = str(native.get("reason", "")) if isinstance(native, Mapping) else ""
    return f"; its kernels are {reason}" if reason.startswith("asked") else ""
