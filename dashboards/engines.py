"""How the engine of a run ran, in words: unit, kernels, executor, threads, precisions.

What a run of an older version did not tell is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboards.data import Run
from engine.placement import ranges
from harness.jobs.kernels import engine_words, fallbacks


def told(run: Run) -> Mapping[str, Any]:
    """What the engine said when it was ready, from the store or from the run's raw events."""
    return run.engine or run.ready


def line(run: Run) -> str:
    """One line, "" when nothing is known."""
    ready = told(run)
    return engine_words(ready) if ready.get("unit") and ready.get("engine") else ""


def rows(run: Run) -> tuple[tuple[str, str], ...]:
    """(name, words) for the page of a run."""
    ready = told(run)
    options, native = _mapping(ready.get("engine")), _mapping(ready.get("native"))
    cpus = ready.get("cpus")
    cores = ranges(cpus) if isinstance(cpus, (list, tuple)) and cpus else ""
    off = options.get("passes_off") or ()
    found = (
        ("Unit", ready.get("unit")),
        ("Executor", options.get("executor")),
        ("Kernels", _kernels(ready)),
        ("Chosen because", native.get("reason")),
        ("Slow kernels", "; ".join(f"{what}: {why}" for what, why in fallbacks(ready))),
        ("Native library", native.get("library")),
        ("Threads", ready.get("threads")),
        ("Cores", cores),
        ("Activations", _activations(options)),
        ("Fused ops", _fused(options.get("fused"), off)),
        ("Keys and values", _joined(options.get("kv"), options.get("kv_layout"))),
        ("Weights", _joined(ready.get("layout"), _huge(options))),
        ("Ring", _ring(options.get("keep"))),
    )
    return tuple((name, str(value)) for name, value in found if value not in (None, ""))


def few_bits(run: Run) -> str:
    """What is rounded to codes of few bits as the engine runs, "" for nothing: then errors of two
    right runs are as large as what the codes lose."""
    options = _mapping(told(run).get("engine"))
    words = []
    if options.get("activations") == "int8":
        words.append("int8 activations")
    if options.get("kv") not in (None, "f32"):
        words.append(f"{options['kv']} keys and values")
    return " and ".join(words)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _kernels(ready: Mapping[str, Any]) -> str:
    """Kernels by kind of op; one word where all are alike."""
    kernels = {str(kind): str(name) for kind, name in _mapping(ready.get("kernels")).items()}
    common = kernels.pop("all", None)
    other = {kind: name for kind, name in kernels.items() if name != common}
    if common is None and len(set(kernels.values())) == 1:
        return next(iter(kernels.values()))
    words = [common] if common else []
    return "; ".join(words + [f"{kind}: {name}" for kind, name in sorted(other.items())])


def _fused(fused: object, off: object) -> str:
    if fused is None:
        return ""
    if not fused:
        return "no"
    left_out = ", ".join(map(str, off)) if isinstance(off, (list, tuple)) else ""
    return f"yes, without {left_out}" if left_out else "yes"


def _activations(options: Mapping[str, Any]) -> str:
    kept = options.get("float_layers") or ()
    words = str(options.get("activations") or "")
    if words != "int8" or not isinstance(kept, (list, tuple)) or not kept:
        return words
    return f"{words}, but float in {', '.join(map(str, kept))}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _huge(options: Mapping[str, Any]) -> str:
    return "in huge pages" if options.get("huge_pages") else ""


def _ring(keep: object) -> str:
    return "" if keep is None else f"keeps the first {keep} positions"
