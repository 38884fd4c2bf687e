"""Comparing a board's numbers with the reference, in float64.

The rule (per op, per position): the board's relative error may be three times that of the naive
implementation with the same quantisation, plus a tolerance. Cosine is blind to scale, so it only
adds to that rule; and each position is judged by itself, because the first position of a decoder is
often a hundred times larger than the others and would hide them in a pooled norm.

TOLERANCE, 2e-3 of a row's norm: storing an intermediate in float16 costs at most 2^-11 = 4.9e-4 of
each value, and that is legitimate; four times that is not. A scale of × 1.02 costs 2e-2.
ELEMENT_TOLERANCE, 2e-2 of (the row's RMS + the value itself): finds one wrong output channel among
tens of thousands, which moves the row's norm by less than TOLERANCE.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.program.ops import Op
from harness.jobs.details import OpError
from harness.verdicts import Outcome

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

BASE_FACTOR = 3.0
TOLERANCE = 2e-3
ELEMENT_TOLERANCE = 2e-2
WARN_COSINE = 0.99
BUG_COSINE = 0.95
CODE_GROUP, CODE_LARGEST = 32, 127  # values that share an int8 code's scale, and its largest code
ROWS_AT_ONCE = 16  # of logits: a float64 copy of all of them would be large
ALONE = ("local", "prefill")  # modes in which an op is fed the reference's inputs


@dataclasses.dataclass(frozen=True)
class Base:
    """The naive implementation's error: of a row's norm, of one value in units of its size, and how
    far its lowest cosine is from 1."""

    row: float = 0.0
    element: float = 0.0
    angle: float = 0.0

    def with_op(self, naive: Array, reference: Array) -> Base:
        """This one, or the largest of another op where that is more."""
        got, want = as_rows(naive), as_rows(reference)
        row = float(relative_rows(got - want, want).max(initial=0.0))
        angle = 1.0 - float(cosine_rows(got, want).min(initial=1.0))
        element = worst_element(got - want, want)[0]
        return Base(max(self.row, row), max(self.element, element), max(self.angle, angle))


NO_BASE = Base()


def as_rows(array: Array) -> Float64:
    """(P, …) → (P, n) float64."""
    return np.asarray(array, dtype=np.float64).reshape(len(array), -1)


def row_norms(rows: Float64) -> Float64:
    """(P, n) → (P,) Euclidean norms."""
    norms: Float64 = np.sqrt(np.einsum("pn,pn->p", rows, rows))
    return norms


def relative_rows(error: Float64, reference: Float64) -> Float64:
    """(P,) error norm over reference norm; where the reference is zero: 0 if the error is, else
    infinity."""
    errors, norms = row_norms(error), row_norms(reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = errors / norms
    relative[norms == 0] = np.where(errors[norms == 0] == 0, 0.0, np.inf)
    return relative


def cosine_rows(a: Float64, b: Float64) -> Float64:
    """(P,) cosines; 1 where both rows are zero, 0 where one is."""
    norm_a, norm_b = row_norms(a), row_norms(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine: Float64 = np.einsum("pn,pn->p", a, b) / (norm_a * norm_b)
    zero = (norm_a == 0) | (norm_b == 0)
    cosine[zero] = np.where((norm_a == norm_b)[zero], 1.0, 0.0)
    return cosine


def compare_op(
    op: Op,
    mode: str,
    board: Array | None,
    reference: Array,
    base: Array | None,
    *,
    shorter: bool = False,
    least: Base = NO_BASE,
) -> OpError:
    """One row of the alignment table.

    `reference` and `base` are (P, …), and so should `board` be. `shorter`: the run is known to have
    stopped, so that rows it did not reach may be left out; else what is missing makes the row
    INVALID, unless what is there fails already. None or no rows: nothing to compare. The naive
    error of every row counts as `least` at least.
    """
    head: dict[str, Any] = {"op": op.id, "kind": op.kind, "layer": op.layer, "mode": mode}
    nothing: dict[str, Any] = {
        "max_abs": None,
        "rel_l2": None,
        "cosine": None,
        "worst_row_rel_l2": None,
    }
    rows = 0 if board is None else min(len(board), len(reference))
    if board is None or rows == 0:
        reason = (
            "not reached: the run ended before this op" if shorter else "the board sent nothing"
        )
        return OpError(
            **head, **nothing, base_rel_l2=0.0, non_finite=0, outcome=Outcome.INVALID, reason=reason
        )
    want, got = as_rows(reference[:rows]), as_rows(board[:rows])
    base_rows = np.full(rows, least.row)
    base_pooled, base_element = 0.0, least.element
    if base is not None:
        naive = as_rows(base[:rows])
        base_rows = np.maximum(least.row, relative_rows(naive - want, want))
        base_pooled = pooled(naive - want, want)
        base_element = max(least.element, float(worst_element(naive - want, want)[0]))
    if got.shape != want.shape or len(board) > len(reference):
        reason = (
            f"the board returned {len(board)} rows of {got.shape[1]} values, expected "
            f"{len(reference)} of {want.shape[1]}"
        )
        return OpError(
            **head, **nothing, base_rel_l2=base_pooled, non_finite=0, outcome=Outcome.FAIL,
            reason=reason,
        )  # fmt: skip
    bad = ~np.isfinite(got)
    if bad.any():
        first = np.argwhere(bad)[0]
        reason = (
            f"{int(bad.sum())} of {bad.size} values are not finite, the first at row {first[0]}, "
            f"value {first[1]}"
        )
        return OpError(
            **head, **nothing, base_rel_l2=base_pooled, non_finite=int(bad.sum()),
            outcome=Outcome.FAIL, reason=reason,
        )  # fmt: skip
    error = got - want
    relative = relative_rows(error, want)
    cosine = float(cosine_rows(got, want).min())
    limits = BASE_FACTOR * base_rows + TOLERANCE
    element, at = worst_element(error, want)
    # Cosines as low as the naive implementation's own are no bug of the board.
    lowered = min(1.0, BASE_FACTOR * least.angle)
    outcome, reason = _decide(
        relative, limits, (row_norms(want), row_norms(got)), cosine, element, at, base_element,
        lowered,
    )  # fmt: skip
    if outcome != Outcome.FAIL and rows < len(reference) and not shorter:
        outcome, reason = Outcome.INVALID, f"only {rows} of {len(reference)} rows came back"
    return OpError(
        **head,
        max_abs=float(np.abs(error).max(initial=0.0)),
        rel_l2=_finite(pooled(error, want)),
        cosine=cosine,
        worst_row_rel_l2=_finite(float(relative.max())),
        base_rel_l2=base_pooled,
        non_finite=0,
        outcome=outcome,
        reason=reason,
        int8_steps=_finite(code_steps(error, want)),
    )


def code_steps(error: Float64, reference: Float64) -> float:
    """The largest |error| in steps of an int8 code, whose scale CODE_GROUP values of a row share: a
    right rounding to such codes is off by half a step. Infinity where the reference is zero."""
    rows, width = error.shape
    if error.size == 0:
        return 0.0
    padding = ((0, 0), (0, -width % CODE_GROUP))
    grouped = [np.abs(np.pad(part, padding)).reshape(rows, -1, CODE_GROUP).max(axis=-1)
               for part in (error, reference)]  # fmt: skip
    worst, largest = grouped  # (P, groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(worst == 0, 0.0, worst * CODE_LARGEST / largest)
    return float(steps.max())


def pooled(error: Float64, reference: Float64) -> float:
    """Relative L2 over all rows together; infinity when only the reference is zero."""
    norm, size = float(np.linalg.norm(error)), float(np.linalg.norm(reference))
    return norm / size if size else (0.0 if norm == 0 else math.inf)


def worst_element(error: Float64, reference: Float64) -> tuple[float, tuple[int, int]]:
    """Largest |error| in units of (the row's RMS + |reference|), and its (row, value)."""
    if error.size == 0:
        return 0.0, (0, 0)
    rms = np.sqrt(np.mean(reference * reference, axis=1, keepdims=True))
    scale = rms + np.abs(reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, np.abs(error) / scale)
    row, column = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    return float(ratio[row, column]), (int(row), int(column))


def _decide(
    relative: Float64,
    limits: Float64,
    norms: tuple[Float64, Float64],  # the reference's, the board's
    cosine: float,
    element: float,
    at: tuple[int, int],
    base_element: float,
    lowered: float,
) -> tuple[Outcome, str]:
    bug, warn = min(BUG_COSINE, 1.0 - lowered), min(WARN_COSINE, 1.0 - lowered)
    worst = int(np.argmax(relative - limits))
    if relative[worst] > limits[worst]:
        if norms[0][worst] == 0:
            return Outcome.FAIL, f"row {worst}: the reference is all zeros, the board's is not"
        if norms[1][worst] == 0:
            return Outcome.FAIL, f"row {worst}: the board's is all zeros, the reference's is not"
        return Outcome.FAIL, (
            f"row {worst} is off by {relative[worst]:.2g} of its norm, limit {limits[worst]:.2g} "
            f"({BASE_FACTOR:g} × naive + {TOLERANCE:g})"
        )
    if cosine < bug:
        return Outcome.FAIL, f"cosine {cosine:.4f}, limit {bug:.2g}"
    limit = BASE_FACTOR * base_element + ELEMENT_TOLERANCE
    if element > limit:
        return Outcome.FAIL, (
            f"value {at[1]} of row {at[0]} is off by {element:.2g} of its size, limit {limit:.2g}"
        )
    if cosine < warn:
        return Outcome.WARN, f"cosine {cosine:.4f}, below {warn:.2g}"
    return Outcome.PASS, ""


@dataclasses.dataclass(frozen=True)
class LogitDrift:
    """The position whose logits are furthest beyond their limit, in units of the row's norm."""

    position: int
    error: float
    limit: float

    @property
    def beyond(self) -> bool:
        return not self.error <= self.limit


def logit_drift(reference: Array, board: Array, base: float) -> LogitDrift | None:
    """Logits (N, V) against (n ≤ N, V) by the rule of an op's rows; None when n is 0.

    The rows of an op are single steps; logits come back of every position, so they show what goes
    wrong in a long prefill. Each row counts relative to its maximum, as the board sends it in
    float16; that costs 2^-12 of a value. `base` is the naive implementation's error.
    """
    limit = BASE_FACTOR * base + TOLERANCE
    worst = None
    for start in range(0, min(len(reference), len(board)), ROWS_AT_ONCE):
        got = np.asarray(board[start : start + ROWS_AT_ONCE], np.float64)
        want = np.asarray(reference[start : start + len(got)], np.float64)
        got, want = (rows - rows.max(axis=-1, keepdims=True) for rows in (got, want))
        errors = np.nan_to_num(relative_rows(got - want, want), nan=np.inf)
        row = int(np.argmax(errors))
        if worst is None or errors[row] > worst.error:
            worst = LogitDrift(start + row, float(errors[row]), limit)
    return worst


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def output_of(
    op: Op, buffers: Mapping[str, Array], given: Mapping[str, Array] | None = None
) -> Array | None:
    """(P, n): everything that `op` wrote, its buffers side by side; None when one is missing or
    empty. Where it added to what it was `given` (see `added_to`), only what it added."""
    parts = [buffers.get(name) for name in op.writes]
    present = [part for part in parts if part is not None]
    if not present or len(present) < len(parts):
        return None
    rows = min(len(part) for part in present)
    if rows == 0:
        return None
    sums = {} if given is None else added_to(op)
    found = []
    for name, part in zip(op.writes, present, strict=True):
        values = part[:rows].reshape(rows, -1)
        source = given.get(sums[name]) if given is not None and name in sums else None
        if source is not None and source[:rows].size == values.size:
            # What the op was given in float32: the difference is exact in float64.
            before = source[:rows].reshape(rows, -1).astype(np.float32)
            values = values.astype(np.float64) - before
        found.append(values)
    return np.concatenate(found, axis=1)


def added_to(op: Op) -> dict[str, str]:
    """Of a fused op that ends with a residual: its output → the buffer from outside that it adds
    to. A residual may be a thousand times what is added, and would hide it in a norm."""
    if len(op.parts) < 2:
        return {}
    inside = {name for part in op.parts for name in part.writes}
    found = {}
    for part in op.parts:
        outside = [name for name in part.reads if name not in inside]
        if part.kind == "add" and len(outside) == 1 and part.writes[0] in op.writes:
            found[part.writes[0]] = outside[0]
    return found


def compare_all(
    ops: Sequence[Op],
    mode: str,
    board: Mapping[str, Array],
    reference: Mapping[str, Array],
    base: Mapping[str, Array],
    *,
    shorter: bool = False,
    scattered: bool = False,
) -> list[OpError]:
    """A row for each op, in program order. Keys are buffer names, arrays (P, …).

    `scattered`: codes of few bits are rounded on the way, so that errors of two right runs fall on
    other rows and begin in other ops each time. Then the largest naive error so far counts.
    """
    found = []
    least = NO_BASE
    for op in ops:
        given = reference if mode in ALONE else None  # what every op alone was fed
        want = output_of(op, reference, given)
        if want is None:
            raise ValueError(f"op {op.id}: the reference holds no {op.writes}")
        got, naive = output_of(op, board, given), output_of(op, base, given)
        if scattered and naive is not None:
            least = least.with_op(naive, want)
        found.append(compare_op(op, mode, got, want, naive, shorter=shorter, least=least))
    return found


def first_failure(rows: Sequence[OpError]) -> OpError | None:
    """The topologically earliest failure of an op alone, as a decode step or in a prefill; the
    rows of each mode are in program order. Free rows never blame: there every op after the first
    wrong one is wrong."""
    order: dict[str, int] = {}
    for row in rows:
        order.setdefault(row.op, len(order))
    failed = [row for row in rows if row.mode in ALONE and row.outcome == Outcome.FAIL]
    return min(failed, key=lambda row: order[row.op], default=None)
