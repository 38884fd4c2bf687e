"""What memory a model needs on a board, before any of it is loaded, and what memory there is.

The estimate comes from a package's header alone. It is compared with the board's memory less what
the system keeps, with what is free right now, with a process's own limit, and with a budget. MiB
are 2^20 bytes. Sources: proc(5) (MemAvailable), getrlimit(2), and of the Linux tree
Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.options import EngineOptions
from engine.runtime.cache import estimate_bytes

if TYPE_CHECKING:
    from engine.architectures import Hyperparameters
    from engine.package import Package

MIB = float(1 << 20)
PIECE = 128  # tokens of one prefill step
# Python, numpy and the engine's own code, as resident before a model is opened (34 to 39 MiB with
# CPython 3.11 and numpy 2 on x86), and what an allocator keeps in reserve: measured peaks lay 45 to
# 55 above what else is counted here.
PROCESS_MB = 56.0
REFERENCE_TILE = 96.0  # the reference dequantises tiles of 32 MiB, with copies
RESERVE_SHARE, LEAST_RESERVE, MOST_RESERVE = 0.08, 48.0, 256.0  # of the memory, MiB


@dataclasses.dataclass(frozen=True)
class Need:
    """What a decoder will have in memory, MiB."""

    weights: float  # mapped from the package, or copied into huge pages
    kv: float
    temporary: float  # activations, logits, tables
    process: float
    context: int
    kv_scheme: str
    copied: bool = False  # weights in memory of the process's own

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.temporary + self.process

    @property
    def own(self) -> float:
        """Without what is mapped from the package."""
        return self.total - (0.0 if self.copied else self.weights)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What there is, MiB; None: not known, or no limit."""

    memory: float | None = None  # that may be had in all
    reserve: float = 0.0  # of it, what the system keeps
    available: float | None = None  # free now, or freed on demand
    data: float | None = None  # of a process's own memory (RLIMIT_DATA)
    budget: float | None = None  # what somebody decided that the engine may take


class OverBudget(ValueError):
    """A model that does not fit. `exceeded` names the limits, the first of LIMITS first."""

    def __init__(self, need: Need, limits: Limits) -> None:
        self.need, self.limits = need, limits
        self.exceeded = exceeded(need, limits)
        super().__init__(f"{sentence(need, limits)}\n{table(need, limits)}")


def need(
    hyperparameters: Hyperparameters,
    weight_bytes: int,
    options: EngineOptions,
    context: int,
    *,
    sequences: int = 1,
    logits: int = 1,
) -> Need:
    """Of a model whose steps read `weight_bytes`, with caches of `context` positions each.

    `logits` is the number of rows (V,) that are kept at once.
    """
    hp = hyperparameters
    return Need(
        weights=weight_bytes / MIB,
        kv=estimate_bytes(hp, context, options.kv, options.kv_layout, sequences) / MIB,
        temporary=_temporary(hp, options, context, logits) / MIB
        + (REFERENCE_TILE if options.unit == "reference" else 0.0),
        process=PROCESS_MB,
        context=context,
        kv_scheme=options.kv,
        copied=options.huge_pages,
    )


def _temporary(hp: Hyperparameters, options: EngineOptions, context: int, logits: int) -> float:
    """Bytes: the buffers of a prefill step that live at the same time, as float32."""
    tokens = min(PIECE, context)
    q, kv = hp.heads * hp.head_dim, hp.kv_heads * hp.head_dim
    buffers = tokens * (4 * hp.width + 2 * q + 4 * kv + 3 * hp.ffn)
    # Numpy holds all scores of a layer and a mask; native kernels go through them in chunks.
    scores = 1.5 * hp.heads * tokens * context if options.unit != "native" else 0.0
    tables = context * hp.head_dim * (2 if options.unit == "native" else 6)
    return 4 * (buffers + scores + tables + 3 * logits * hp.vocab)


def exceeded(need: Need, limits: Limits) -> tuple[str, ...]:
    """Which limits the need goes beyond: "budget", "memory", "data", "available"."""
    return tuple(
        name
        for name, wanted, limit in _comparisons(need, limits)
        if limit is not None and wanted > limit
    )


def _comparisons(need: Need, limits: Limits) -> Iterator[tuple[str, float, float | None]]:
    yield "budget", need.total, limits.budget
    usable = None if limits.memory is None else limits.memory - limits.reserve
    yield "memory", need.total, usable
    yield "data", need.own, limits.data
    # What is mapped comes and goes with other uses of memory, but a step reads all of it.
    yield "available", need.total, limits.available


WORDS = {
    "budget": "the budget allows",
    "memory": "the board has, less what its system keeps,",
    "data": "a process there may have for itself",
    "available": "are available now",
}


def sentence(need: Need, limits: Limits) -> str:
    """What is too large for which limit, in one line; what fits is told so."""
    size = f"{need.total:.0f} MiB at a context of {need.context}"
    beyond = exceeded(need, limits)
    if not beyond:
        return f"the model needs {size}, which fits"
    wanted, limit = next((w, m) for name, w, m in _comparisons(need, limits) if name == beyond[0])
    if beyond[0] == "data":
        return f"the model needs {wanted:.0f} MiB of its own, {WORDS['data']} {limit:.0f}"
    if beyond[0] == "available":
        return f"the model needs {size}, {limit:.0f} MiB {WORDS['available']}"
    return f"the model needs {size}, {WORDS[beyond[0]]} {limit:.0f}"


def rows(need: Need, limits: Limits) -> list[tuple[str, float]]:
    """The budget table: (what, MiB)."""
    how = "copied into huge pages" if need.copied else "mapped"
    found = [
        (f"weights, {how}", need.weights),
        (f"KV cache, {need.context} positions, {need.kv_scheme}", need.kv),
        ("temporary: activations, logits, tables", need.temporary),
        ("Python and libraries", need.process),
        ("the engine in all", need.total),
    ]
    known = (
        ("memory in all", limits.memory),
        ("of it kept for the system", limits.reserve if limits.memory is not None else None),
        ("available now", limits.available),
        ("limit of a process's own memory", limits.data),
        ("budget", limits.budget),
    )
    return found + [(what, value) for what, value in known if value is not None]


def table(need: Need, limits: Limits) -> str:
    """`rows` for people, a line each."""
    lines = rows(need, limits)
    width = max(len(what) for what, _ in lines)
    return "\n".join(f"  {what:<{width}} {value:8.0f} MiB" for what, value in lines)


def reserve_of(memory: float) -> float:
    """What the system of a board with so much memory keeps for itself, MiB."""
    return min(MOST_RESERVE, max(LEAST_RESERVE, RESERVE_SHARE * memory))


def require_fits(
    package: Package,
    options: EngineOptions,
    context: int,
    limits: Limits | None = None,
    *,
    sequences: int = 1,
) -> Need:
    """The need of an opened package, of which no weight has been read yet. `limits` None: those of
    this computer.

    Raises OverBudget with the table.
    """
    wanted = need(
        package.hyperparameters, package.weight_bytes, options, context, sequences=sequences
    )
    here = limits_here() if limits is None else limits
    if exceeded(wanted, here):
        raise OverBudget(wanted, here)
    return wanted


# --- this computer ---------------------------------------------------------------------------


def limits_here(root: Path = Path("/")) -> Limits:
    """What this process may have, as its kernel tells."""
    import resource

    data, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limits = parse_limits(
        _read(root / "proc/meminfo"),
        [
            (_read(folder / "memory.max"), _read(folder / "memory.current"),
             _read(folder / "memory.stat"))
            for folder in _groups(root)
        ],
    )  # fmt: skip
    return dataclasses.replace(limits, data=None if data < 0 else data / MIB)


def parse_limits(meminfo: str, groups: list[tuple[str, str, str]]) -> Limits:
    """From /proc/meminfo, and memory.max, .current and .stat of the control groups above us."""
    known = {name: int(kb) / 1024 for name, kb in re.findall(r"(?m)^(\w+): +(\d+) kB$", meminfo)}
    memory, available = known.get("MemTotal"), known.get("MemAvailable")
    reserve = reserve_of(memory) if memory is not None else 0.0
    for most, current, stat in groups:
        if not (most.strip().isdigit() and current.strip().isdigit()):
            continue
        cached = re.search(r"(?m)^file (\d+)$", stat)  # given back on demand
        used = int(current) - (int(cached[1]) if cached else 0)
        free = max(0.0, (int(most) - used) / MIB)
        if memory is None or int(most) / MIB < memory:
            # The system lies outside of the group.
            memory, reserve = int(most) / MIB, 0.0
        available = free if available is None else min(available, free)
    return Limits(memory, reserve, available)


def _groups(root: Path) -> list[Path]:
    """Folders of our control group and those above it, where they are mounted (version 2)."""
    match = re.search(r"(?m)^0::(/.*)$", _read(root / "proc/self/cgroup"))
    if not match:
        return []
    top = root / "sys/fs/cgroup"
    own = top / match[1].lstrip("/")
    return [own, *(folder for folder in own.parents if top in (folder, *folder.parents))]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
