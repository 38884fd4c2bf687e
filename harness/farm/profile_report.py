"""What `harness profile` tells people, and the trace file that it leaves for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.deploy.cache import atomic_file
from harness.errors import HarnessError
from harness.jobs.chrome_trace import chrome_trace
from harness.jobs.profile import PROFILE, read_times
from harness.jobs.runlog import RunLog
from harness.store import raw
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from harness.farm.results import CampaignResult, StageResult
    from harness.store import Store

COLUMNS = ("op", "unit", "calls", "shallow µs", "deep µs", "share", "MB", "GB/s", "of ceiling")


def report(result: CampaignResult, *, every_op: bool = False) -> Iterator[str]:
    """Lines for each board: the verdict, its checks, and the table of ops."""
    several = False
    for row in result.results.values():
        for item in row.values():
            if several:
                yield ""
            several = True
            yield from _one(item, every_op)
    for sentence in result.left_behind:
        yield f"left behind on {sentence}"


def _one(item: StageResult, every_op: bool) -> Iterator[str]:
    verdict, details = item.verdict, item.verdict.details
    kind = f" ({item.error_kind})" if item.error_kind else ""
    yield f"{item.board} {item.outcome.value.upper()}{kind}: {verdict.headline}"
    for check in verdict.checks:
        mark = "" if check.outcome in (Outcome.PASS, Outcome.BLOCKED) else "! "
        yield f"  {check.name.replace('_', ' '):<12} {mark}{check.sentence}"
    if verdict.remedy:
        yield f"  next: {verdict.remedy}"
    if details.get("groups"):
        yield ""
        yield from table(details, every_op)
        yield ""
        yield from activity(details)


def table(details: Mapping[str, Any], every_op: bool = False) -> Iterator[str]:
    """The ops in columns; the same op of all layers is one row, unless `every_op`."""
    deep = details["depths"][-1]
    ops = details["ops"] if every_op else details["groups"]
    rows = [COLUMNS, *(_cells(op) for op in ops)]
    residual = ("between ops", "", "", "", f"{1e3 * deep['residual_ms']:.1f}",
                f"{deep['residual_ms'] / deep['traced_ms']:.1%}", "", "", "")  # fmt: skip
    whole = ("a token", "", "", f"{1e3 * details['depths'][0]['traced_ms']:.1f}",
             f"{1e3 * deep['traced_ms']:.1f}", "100%", f"{deep['bytes'] / 1e6:.2f}",
             f"{deep['gb_s']:.2f}", _share(deep["gb_s"], details["bandwidth_gb_s"]))  # fmt: skip
    rows += [residual, whole]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = "  ".join(
            cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)
        )
        yield f"  {left}  {right}".rstrip()


def _cells(op: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        op["op"],
        op["part"],
        str(op["calls"]),
        f"{op['shallow_us']:.1f}",
        f"{op['deep_us']:.1f}",
        f"{op['share']:.1%}",
        f"{op['bytes'] / 1e6:.2f}" if op["bytes"] else "–",
        "–" if op["gb_s"] is None else f"{op['gb_s']:.2f}",
        "–" if op["of_ceiling"] is None else f"{op['of_ceiling']:.0%}",
    )


def _share(rate: float, ceiling: float) -> str:
    return f"{rate / ceiling:.0%}" if ceiling else "–"


def activity(details: Mapping[str, Any]) -> Iterator[str]:
    """Cores, faults, switches and counters, a line each."""
    deep = details["depths"][-1]
    if details["cpu_busy"] is not None:
        cores = ", ".join(f"{core}: {busy:.0%}" for core, busy in details["cores"])
        yield (
            f"  threads of the engine: {details['threads']}, busy for {details['cpu_busy']:.0%} of "
            f"their time; cores: {cores or 'not told'}"
        )
    accelerators = ", ".join(f"{name} {busy:.0%}" for name, busy in details["accelerators"])
    yield f"  accelerators: {accelerators or 'none tells its load'}"
    yield (
        f"  a token: {deep['minor_faults']:.1f} page faults ({deep['major_faults']:.1f} waited for "
        f"storage), {deep['voluntary_switches']:.1f} waits, {deep['involuntary_switches']:.1f} "
        "times another process took the core"
    )
    for name, value in deep["counters"].items():
        yield f"  a token: {value:.4g} {name.replace('_', ' ')}"
    reasons: dict[str, list[str]] = {}
    for name, reason in details["counters_missing"]:
        reasons.setdefault(reason, []).append(name.replace("_", " "))
    for reason, names in reasons.items():
        yield f"  not counted: {', '.join(names)}: {reason}"


def write_traces(result: CampaignResult, store: Store, path: Path) -> list[Path]:
    """A trace file of every board that was profiled; with several boards the name gets theirs.

    Raises HarnessError for a place that cannot be written.
    """
    written = []
    for board, row in result.results.items():
        item = row.get(PROFILE.name)
        if item is None or item.run_id is None or not item.verdict.details.get("groups"):
            continue
        target = path
        if len(result.results) > 1:
            target = path.with_name(f"{path.stem}-{board}{path.suffix or '.json'}")
        document = trace_of(store, item.run_id, board)
        try:
            with atomic_file(target) as file:
                file.write(json.dumps(document, separators=(",", ":")).encode())
        except OSError as error:
            raise HarnessError(
                f"the trace cannot be written: {error.strerror}",
                where=str(target),
                remedy="name another file with --trace",
            ) from error
        written.append(target)
    return written


def trace_of(store: Store, run_id: str, board: str) -> dict[str, Any]:
    """All traced tokens of a stored run as Chrome's JSON."""
    folder = store.raw_folder(run_id)
    events = list(raw.events(folder / "events.jsonl"))
    log = RunLog(run_id, events, folder, "finished", "")
    line, _ = read_times(log)
    ready = log.ready or {}
    about = {"board": board, "run": run_id, "model": ready.get("model"), "unit": ready.get("unit")}
    return chrome_trace(f"{board}: {ready.get('model')}", log.data("program"), line, about)
