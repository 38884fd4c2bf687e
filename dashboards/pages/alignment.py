"""The Alignment page: which op leaves the reference first, and what it does to the text."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence

from dashboards import engines, plain
from dashboards.charts import Chart, Heat, Table, heat, histogram
from dashboards.data import Case, Run
from dashboards.pages.base import Page, Places, missing_note
from dashboards.scales import level
from harness.jobs.details import LogitsAgreement, OpError, TextComparison

MODES = {
    "local": "Local: each op is fed the reference's inputs, so an error is its own",
    "prefill": "Prefill: the same, with several tokens at once",
    "free": "Free: the engine runs on its own, so errors travel on",
}
METRICS = {"rel_l2": "Relative L2", "cosine": "Cosine", "max_abs": "Max-abs"}
BAD_SHOWN = 12
DIFF_WORDS = 3000  # longer texts are compared up to here; the comparison grows with the square

# Levels 0 (agrees) to 5 (far away); what fails is marked by its outcome, not by its level.
EDGES = {
    "rel_l2": (1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    "cosine": (1e-9, 1e-7, 1e-5, 1e-2, 5e-2),  # of 1 − cosine; warn below .99, bug below .95
    "max_abs": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
}
EDGE_WORDS = {
    "rel_l2": ("< 1e−5", "1e−5", "1e−4", "1e−3", "0.01", "≥ 0.1"),
    "cosine": ("1", "1 − 1e−9", "1 − 1e−7", "0.99999", "0.99", "≤ 0.95"),
    "max_abs": ("< 1e−4", "1e−4", "1e−3", "0.01", "0.1", "≥ 1"),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a text: "same", "gone" (only in the reference) or "new" (only on the board)."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Maps:
    metric: str
    title: str
    heats: tuple[tuple[str, Heat], ...]  # (sentence about the mode, map)
    legend: tuple[tuple[str, str], ...]  # (class, words)


def page(case: Case, run: Run, places: Places) -> Page:
    details = run.details
    ops: Sequence[OpError] = details["ops"] or ()
    first = details["first_bad_op"] or run.culprit
    text: TextComparison | None = details["text"]
    logits: LogitsAgreement | None = details["logits"]
    return Page(
        places.case(case, "alignment"),
        "alignment.html.jinja",
        {
            "title": f"Alignment · {case.board.name}",
            "case": case,
            "active": "alignment",
            "run": run,
            "run_link": places.run(run),
            "note": missing_note(run),
            "details": details,
            "first": first,
            "first_error": first_error(ops, first),
            "maps": maps(ops, first),
            "rounded": engines.few_bits(run),
            "bad": bad_ops(ops)[:BAD_SHOWN],
            "bad_more": max(0, len(bad_ops(ops)) - BAD_SHOWN),
            "counts": counts(ops),
            "ops_table": ops_table(ops).thinned(1500) if ops else None,
            "logits": logits,
            "histogram": kl_chart(logits) if logits else None,
            "text": text,
            "pieces": diff(text.reference, text.board) if text else ((), ()),
        },
    )


def kind_of(op: str) -> str:
    """`L07.ffn.down` → `ffn.down`: the row of the map."""
    return re.sub(r"^L\d+\.", "", op)


def layer_columns(ops: Sequence[OpError]) -> list[tuple[str, int | None]]:
    """The columns: what comes before the layers, the layers, what comes after; as (name, layer)."""
    outside = list(dict.fromkeys(op.op.split(".")[0] for op in ops if op.layer is None))
    layers = sorted({op.layer for op in ops if op.layer is not None})
    before: list[tuple[str, int | None]] = [(n, None) for n in outside if n.startswith("embed")]
    after: list[tuple[str, int | None]] = [(n, None) for n in outside if not n.startswith("embed")]
    return before + [(str(layer), layer) for layer in layers] + after


def worst_of_columns(
    ops: Sequence[OpError], columns: Sequence[tuple[str, int | None]]
) -> dict[tuple[str, str], OpError]:
    """The op with the lowest cosine (not finite counts as lowest) of each (mode, column's name)."""
    names = {layer: name for name, layer in columns if layer is not None}

    def rank(op: OpError) -> float:
        if op.cosine is not None and not op.non_finite:
            return op.cosine
        return -2.0 if op.outcome == "fail" else 2.0  # 2: the run ended before this op

    worst: dict[tuple[str, str], OpError] = {}
    for op in ops:
        name = op.op.split(".")[0] if op.layer is None else names.get(op.layer)
        if name is None:
            continue
        before = worst.get((op.mode, name))
        if before is None or rank(op) < rank(before):
            worst[op.mode, name] = op
    return worst


def _worse(op: OpError) -> str:
    return {"fail": " bad", "warn": " poor"}.get(op.outcome, "")


def cell_style(op: OpError, metric: str) -> str:
    """The class of an op's cell: its level, and a mark where it is poor or bad."""
    value = {"rel_l2": op.rel_l2, "cosine": op.cosine, "max_abs": op.max_abs}[metric]
    if op.non_finite:
        return "nonfinite" + _worse(op)
    if value is None:
        return "absent" + _worse(op)
    distance = 1.0 - value if metric == "cosine" else value
    return f"h{level(distance, EDGES[metric])}{_worse(op)}"


def say(op: OpError, metric: str) -> str:
    if op.non_finite:
        return f"{op.non_finite} values not finite"
    if op.cosine is None and op.rel_l2 is None:
        return "not compared"
    if metric == "cosine":
        return f"cosine {plain.cosine(op.cosine)}"
    value = op.rel_l2 if metric == "rel_l2" else op.max_abs
    base = f", naive baseline {plain.number(op.base_rel_l2, 2)}" if metric == "rel_l2" else ""
    return f"{METRICS[metric].lower()} {plain.number(value)}{base}"


def maps(ops: Sequence[OpError], first: str | None) -> tuple[Maps, ...]:
    """For each metric one map per comparison: ops down, layers across, the first bad op ringed."""
    if not ops:
        return ()
    columns = layer_columns(ops)
    modes = [mode for mode in MODES if any(op.mode == mode for op in ops)]
    found = []
    for metric, title in METRICS.items():
        heats = tuple((MODES[mode], _map(ops, mode, metric, columns, first)) for mode in modes)
        found.append(Maps(metric, title, heats, ramp(metric)))
    return tuple(found)


def ramp(metric: str) -> tuple[tuple[str, str], ...]:
    """The legend of a metric's colours as (class, words)."""
    return tuple((f"h{index}", words) for index, words in enumerate(EDGE_WORDS[metric]))


def _map(
    ops: Sequence[OpError],
    mode: str,
    metric: str,
    columns: list[tuple[str, int | None]],
    first: str | None,
) -> Heat:
    inside = [op for op in ops if op.mode == mode]
    # Ops outside the layers (embedding, head) share one row, so the grid stays dense.
    layered = list(dict.fromkeys(kind_of(op.op) for op in inside if op.layer is not None))
    outside = list(dict.fromkeys(op.op for op in inside if op.layer is None))
    rows = [*layered, *outside]
    place = {
        (kind_of(op.op), op.layer if op.layer is not None else op.op.split(".")[0]): op
        for op in inside
    }

    def at(row: int, column: int) -> OpError | None:
        name, layer = columns[column]
        return place.get((rows[row], name if layer is None else layer))

    def cell(row: int, column: int) -> tuple[str, str] | None:
        op = at(row, column)
        if op is None:
            return None
        reason = f" ({op.reason})" if op.reason else ""
        return cell_style(op, metric), f"{op.op}: {say(op, metric)}{reason}"

    ring = next(
        (
            (row, column)
            for column in range(len(columns))
            for row in range(len(rows))
            if (found := at(row, column)) is not None and found.op == first
        ),
        None,
    )
    return heat(
        f"map-{metric}-{mode}",
        f"{METRICS[metric]} of {len(inside)} ops against the reference, {mode}"
        + (f"; the first bad op is {first}" if ring is not None else ""),
        rows,
        [name for name, _ in columns],
        cell,
        ring=ring,
        ring_label=first or "",
    )


def first_error(ops: Sequence[OpError], first: str | None) -> OpError | None:
    """The numbers of the first bad op: of a comparison that it failed, local before the others."""
    named = [op for op in ops if op.op == first]
    order = list(MODES)
    return min(
        named,
        key=lambda op: (
            op.outcome in ("pass", ""),
            order.index(op.mode) if op.mode in order else len(order),
        ),
        default=None,
    )


def bad_ops(ops: Sequence[OpError]) -> tuple[OpError, ...]:
    """Ops that failed or warn: failures first, each in the order of the program."""
    bad = [op for op in ops if op.outcome not in ("pass", "")]
    return tuple(sorted(bad, key=lambda op: op.outcome != "fail"))


def counts(ops: Sequence[OpError]) -> tuple[tuple[str, int, int], ...]:
    """(mode, ops compared, ops that did not pass)."""
    return tuple(
        (
            mode,
            sum(op.mode == mode for op in ops),
            sum(op.mode == mode and op.outcome not in ("pass", "") for op in ops),
        )
        for mode in MODES
        if any(op.mode == mode for op in ops)
    )


def ops_table(ops: Sequence[OpError]) -> Table:
    return Table(
        "Every op",
        (
            "op",
            "mode",
            "cosine",
            "rel L2",
            "naive rel L2",
            "worst row rel L2",
            "max-abs",
            "int8 steps",
            "not finite",
            "outcome",
            "reason",
        ),
        tuple(
            (
                op.op,
                op.mode,
                op.cosine,
                op.rel_l2,
                op.base_rel_l2,
                op.worst_row_rel_l2,
                op.max_abs,
                op.int8_steps,
                op.non_finite,
                op.outcome,
                op.reason,
            )
            for op in ops
        ),
    )


def kl_chart(logits: LogitsAgreement) -> Chart | None:
    bins = logits.kl_histogram
    table = Table(
        "KL divergence per position",
        ("from, log10", "positions"),
        tuple((edge if math.isfinite(edge) else "0", count) for edge, count in bins),
    )
    texts = f" of {logits.prompts} texts" if logits.prompts > 1 else ""
    return histogram(
        "kl",
        f"Histogram of the KL divergence over {logits.positions} positions{texts}, "
        f"mean {plain.number(logits.mean_kl)}",
        bins,
        x_label="KL divergence per position",
        table=table,
    )


def diff(reference: str, board: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Both texts cut into pieces that agree or differ, compared word by word."""
    left, right = _words(reference), _words(board)
    rest_left, rest_right = left[DIFF_WORDS:], right[DIFF_WORDS:]
    left, right = left[:DIFF_WORDS], right[:DIFF_WORDS]
    gone: list[Piece] = []
    new: list[Piece] = []
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        same = tag == "equal"
        if a1 > a0:
            gone.append(Piece("same" if same else "gone", "".join(left[a0:a1])))
        if b1 > b0:
            new.append(Piece("same" if same else "new", "".join(right[b0:b1])))
    if rest_left:
        gone.append(Piece("same", "".join(rest_left)))
    if rest_right:
        new.append(Piece("same", "".join(rest_right)))
    return tuple(gone), tuple(new)


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)
