"""What a plan rests on, from a model file, the store and the board; and the plan for people."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.architectures import Hyperparameters, family_of
from engine.formats import open_checkpoint
from engine.formats.checkpoint import FormatError
from engine.measure.memory import Limits, reserve_of
from harness.boards.facts import Facts, memory_facts
from harness.deadline import Deadline
from harness.errors import HarnessError
from harness.inventory import Board, Budget, load_farm
from harness.jobs.memory import limits_of
from harness.planning import Own, Plan, Row, beyond_ceiling
from harness.store.measured import bandwidth_of, curve_of, facts_of

if TYPE_CHECKING:
    from harness.store import Store

PROBE_S = 60.0
COLUMNS = (
    "weights", "KV", "weights MiB", "KV MiB", "other MiB", "all MiB", "fits", "longest context",
    "tok/s at most, start", "end",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DescribedModel:
    """A model file, of which only the header was read."""

    name: str
    hyperparameters: Hyperparameters
    own: Own


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known about a board, each with where it comes from. `measured` is what a latency
    curve found of the same model there; it may be empty."""

    board: str
    limits: Limits
    memory_source: str
    bandwidth_gb_s: float | None
    bandwidth_source: str
    available_mb: float | None
    floor: float | None
    measured: Mapping[str, Any]


def describe_model(path: Path) -> DescribedModel:
    """Raises FormatError for a file that is no model we know, HarnessError when there is none."""
    if not path.exists():
        raise HarnessError(
            "no such file or folder",
            where=str(path),
            expected="a GGUF file, or a safetensors file or folder",
        )
    checkpoint = open_checkpoint(path)
    try:
        layout = family_of(checkpoint).read(checkpoint)
        hp = layout.hyperparameters
        read = {name: file for name, file in layout.sources.items() if hp.tied or name != "embed"}
        tensors = [checkpoint.tensors[file] for file in read.values()]
        size = sum(tensor.nbytes for tensor in tensors)
        types: Counter[str] = Counter()
        for tensor in tensors:
            types[tensor.type] += tensor.nbytes
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error
    finally:
        checkpoint.close()
    name = path.absolute().name if path.is_dir() else path.stem
    return DescribedModel(name, hp, Own(f"{types.most_common(1)[0][0]} file", size))


def gather(
    store: Store,
    model: str,
    *,
    board: str | None,
    farm: Path,
    memory_mb: float | None = None,
    bandwidth: float | None = None,
) -> Known:
    """From what was given, the store and, where neither tells the memory, the board itself.

    Raises HarnessError for a board that nobody knows, BoardError for one that does not answer.
    """
    if board is None and memory_mb is None:
        raise HarnessError(
            "neither a board nor a memory is given",
            expected="--board NAME, or --memory-mb MIB for a board that is not there yet",
        )
    told = facts_of(store, board) if board is not None else None
    known_memory = memory_mb is not None or told is not None
    entry = _entry(board, farm, required=not known_memory) if board is not None else None
    budget = entry.budget if entry is not None else Budget()
    available = None
    if memory_mb is not None:
        limits = Limits(memory_mb, reserve_of(memory_mb), budget=budget.memory_mb)
        source = "given"
    else:
        facts, source = _facts(told, entry)
        limits, available = limits_of(facts, budget), facts.available_mb
        if limits.memory is None and limits.data is None:
            raise HarnessError(
                f"board {board} does not tell its memory", remedy="give it with --memory-mb"
            )
    seen = bandwidth_of(store, board) if board is not None else None
    if bandwidth is not None:
        rate, rate_source = bandwidth, "given"
    elif seen is not None:
        rate, rate_source = seen.gb_s, seen.words
    else:
        rate, rate_source = None, "`harness profile` measures it, --bandwidth gives it"
    return Known(
        board or "a board that is not there yet",
        limits,
        source,
        rate,
        rate_source,
        available,
        budget.min_tokens_per_s,
        _measured(store, board, model),
    )


def _entry(name: str, farm: Path, *, required: bool) -> Board | None:
    """The board's entry. One that ran before, or whose memory is given, need not have one."""
    if not required and not farm.exists():
        return None
    boards = load_farm(farm).boards
    if name in boards or not required:
        return boards.get(name)
    return load_farm(farm).select([name])[0]  # which tells near names


def _facts(told: Mapping[str, Any] | None, entry: Board | None) -> tuple[Facts, str]:
    """The board's facts and where they are from."""
    if told is not None:
        found = memory_facts(told)
        if found.memory_mb is not None:
            return found, "told when it was last used"
    if entry is None:
        raise HarnessError(
            "the store knows nothing about this board's memory",
            remedy="add it to devices.yaml, or give --memory-mb",
        )
    from harness.boards.probe import probe
    from harness.connect import open_session

    deadline = Deadline.after(PROBE_S, f"probe of {entry.name}")
    with open_session(entry, deadline=deadline) as session:
        return probe(session, deadline=deadline), "told just now"


def _measured(store: Store, board: str | None, model: str) -> dict[str, Any]:
    seen = curve_of(store, board, model) if board is not None else None
    if seen is None:
        return {}
    scheme, details = seen
    return {
        "scheme": scheme,
        **{
            name: details.get(name)
            for name in ("context", "tokens_per_s_start", "tokens_per_s_end", "rss_peak_mb")
        },
    }


# --- for people and programs -----------------------------------------------------------------


def report(model: str, known: Known, plan: Plan) -> Iterator[str]:
    """The verdict first, then what it rests on, then the table."""
    yield f"{model} on {known.board}, {plan.context} positions"
    yield f"  {plan.reason}"
    memory = plan.limits.memory if plan.limits.memory is not None else plan.limits.data
    words = f"  memory     {memory:.0f} MiB ({known.memory_source})"
    if plan.limits.reserve:
        words += f", of which the system keeps {plan.limits.reserve:.0f}"
    if plan.limits.budget is not None:
        words += f"; the budget allows {plan.limits.budget:.0f}"
    yield words
    if known.available_mb is not None:
        yield f"  free then  {known.available_mb:.0f} MiB, no limit of the plan"
    rate = known.bandwidth_gb_s
    told = f"{rate:.2f} GB/s" if rate is not None else "unknown"
    yield f"  bandwidth  {told} ({known.bandwidth_source})"
    if known.floor is not None:
        yield f"  budget     at least {known.floor:g} tokens/s at the end of the context"
    if known.measured:
        yield f"  measured   {_measured_words(known.measured)}"
        above = beyond_ceiling(plan, plan.rows[0].weights, known.measured.get("tokens_per_s_start"))
        if above:
            yield f"             {above}"
    yield ""
    yield from table(plan)


def _measured_words(found: Mapping[str, Any]) -> str:
    words = [f"{found['scheme']}:"]
    start, end = found.get("tokens_per_s_start"), found.get("tokens_per_s_end")
    if start is not None and end is not None:
        words.append(f"{start:.1f} tokens/s at the start, {end:.1f} at {found.get('context')},")
    if found.get("rss_peak_mb") is not None:
        words.append(f"peak {found['rss_peak_mb']:.0f} MiB")
    return " ".join(words).rstrip(",")


def table(plan: Plan) -> Iterator[str]:
    """A line for each way to store weights, keys and values; the one to try first is marked."""
    rows = [("", *COLUMNS), *(("→" if r is plan.choice else "", *_cells(r)) for r in plan.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False))
        right = "  ".join(
            cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)
        )
        yield f"{left}  {right}".rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.weights,
        row.kv,
        f"{row.need.weights:.0f}",
        f"{row.need.kv:.0f}",
        f"{row.need.temporary + row.need.process:.0f}",
        f"{row.need.total:.0f}",
        "yes" if row.fits else f"no: {row.beyond}",
        str(row.longest) if row.longest else "none",
        _rate(row.ceiling_start),
        _rate(row.ceiling_end),
    )


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def as_json(model: str, known: Known, plan: Plan) -> dict[str, Any]:
    """The same for programs; sizes in MiB."""
    return {
        "model": model,
        "board": known.board,
        "context": plan.context,
        "choice": _row_json(plan.choice) if plan.choice is not None else None,
        "reason": plan.reason,
        "memory": {
            **{k: v for k, v in dataclasses.asdict(plan.limits).items() if k != "available"},
            "available": known.available_mb,
            "source": known.memory_source,
        },
        "bandwidth": {"gb_s": known.bandwidth_gb_s, "source": known.bandwidth_source},
        "min_tokens_per_s": known.floor,
        "measured": dict(known.measured),
        "rows": [_row_json(row) for row in plan.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "weights": row.weights,
        "kv": row.kv,
        "weights_mb": row.need.weights,
        "kv_mb": row.need.kv,
        "temporary_mb": row.need.temporary,
        "process_mb": row.need.process,
        "total_mb": row.need.total,
        "fits": row.fits,
        "beyond": row.beyond or None,
        "longest_context": row.longest,
        "ceiling_tokens_per_s_start": row.ceiling_start,
        "ceiling_tokens_per_s_end": row.ceiling_end,
    }
