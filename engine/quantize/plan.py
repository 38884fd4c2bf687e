"""Which scheme each tensor of a package gets, and the tensors made by it, one at a time."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.blocks import dequantise
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.quantize.from_float import FloatScheme, largest_number, quantise_rows, scale_type
from engine.quantize.ggml import Quantised
from engine.quantize.repack import Repacked, lay_out, repack, require_finite, to_half
from engine.quantize.schemes import LAYOUTS

_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
AS_IT_IS = "source"
KEPT = "w8-32"
# At 4 bits the output matrix, which in many models is the embedding too, keeps precision first: its
# error goes straight into the logits.
KEEP_AT_4_BITS = ("embed", "head.logits")
# Rows are quantised in pieces of about this many values, which the second-level cache holds.
_PIECE = 1 << 18


@dataclasses.dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` (fnmatch) get `scheme`; None leaves them as they are."""

    pattern: str
    scheme: FloatScheme | None

    @staticmethod
    def parse(text: str) -> Rule:
        """`PATTERN` keeps w8-32, `PATTERN=SCHEME` another scheme, `PATTERN=source` the file's."""
        pattern, _, scheme = text.partition("=")
        if not pattern:
            raise ValueError(f"keep is {text!r}, expected PATTERN or PATTERN=SCHEME")
        if scheme == AS_IT_IS:
            return Rule(pattern, None)
        return Rule(pattern, FloatScheme.parse(scheme or KEPT))


@dataclasses.dataclass(frozen=True)
class QuantPlan:
    """`scheme` None moves every tensor as it is. The first rule that matches a tensor wins.

    `strict` refuses a tensor that cannot have its scheme, where otherwise it gets a narrower group
    or 16-bit floats, and a note.
    """

    layout: str = "blocked"
    scheme: FloatScheme | None = None
    rules: tuple[Rule, ...] = ()
    strict: bool = False

    @staticmethod
    def parse(
        layout: str, scheme: str | None, keep: Sequence[str] | None, strict: bool = False
    ) -> QuantPlan:
        """`keep` None is KEEP_AT_4_BITS for w4 and nothing for w8. Raises ValueError."""
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
        if scheme is None:
            if keep:
                raise ValueError(
                    f"keep is {list(keep)}, but no scheme is given, and without one every tensor "
                    "is kept as it is; name a scheme, such as w4-128"
                )
            return QuantPlan(layout, strict=strict)
        parsed = FloatScheme.parse(scheme)
        if keep is None:
            keep = KEEP_AT_4_BITS if parsed.bits == 4 else ()
            return QuantPlan(layout, parsed, tuple(Rule.parse(name) for name in keep), strict)
        return QuantPlan(layout, parsed, tuple(Rule.parse(text) for text in keep), strict)

    def check(self, names: Collection[str]) -> None:
        """Raises ValueError for a rule that no tensor matches, the default ones excepted."""
        for rule in self.rules:
            if rule.pattern in KEEP_AT_4_BITS:  # a tied model has no head of its own
                continue
            if not fnmatch.filter(names, rule.pattern):
                shown = ", ".join(sorted(names)[:4])
                raise ValueError(
                    f"keep {rule.pattern!r} matches none of the {len(names)} tensors; they have "
                    f"names such as {shown}"
                )

    def scheme_of(self, name: str) -> FloatScheme | None:
        for rule in self.rules:
            if fnmatch.fnmatchcase(name, rule.pattern):
                return rule.scheme
        return self.scheme

    def make(
        self,
        checkpoint: Checkpoint,
        target: str,
        source: str,
        row_order: npt.NDArray[np.int64] | None = None,
    ) -> Repacked:
        """Tensor `source` of the file as the package's `target`. Raises FormatError."""
        shape = checkpoint.tensors[source].shape
        asked = self.scheme_of(target)
        if len(shape) != 2 or asked is None:
            return repack(checkpoint, source, row_order, self.layout)
        scheme = asked.fitting(shape[1])
        if scheme != asked:
            problem = (
                f"{shape[1]} inputs are no multiple of the {asked.group or 32} that {asked} needs"
            )
            if self.strict:
                raise FormatError(
                    f"{checkpoint.path}: tensor {source!r}: {problem}; choose a smaller group, or "
                    "let the packer do so"
                )
            if scheme is None:
                return to_half(checkpoint, source, row_order, f"{problem}; kept as f16")
            made = quantise(checkpoint, source, scheme, row_order, self.layout)
            return dataclasses.replace(made, note=f"{problem}; quantised to {scheme}")
        made = quantise(checkpoint, source, scheme, row_order, self.layout)
        kind = checkpoint.tensors[source].type
        if kind in _FLOAT_TYPES or not made.error:
            return made
        note = f"{kind} in the file, quantised again to {scheme}; from floats it would lose less"
        return dataclasses.replace(made, note=note)


def quantise(
    checkpoint: Checkpoint,
    source: str,
    scheme: FloatScheme,
    row_order: npt.NDArray[np.int64] | None,
    layout: str,
) -> Repacked:
    """Tensor `source` (N, K) quantised, in pieces of rows. Raises FormatError for NaN or infinity.

    Its `error` is the root of squared error over squared weights.
    """
    info = checkpoint.tensors[source]
    outputs, inputs = info.shape
    low = high = 0.0
    for rows, values in _pieces(checkpoint, source, row_order):
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        if not (math.isfinite(values.min()) and math.isfinite(values.max())):
            require_finite(checkpoint, source, np.isfinite(values), rows=rows)
    dtype = scale_type(largest_number(low, high, scheme))
    found: dict[str, npt.NDArray[Any]] = {}
    error = power = 0.0
    for start, (_, values) in zip(_starts(inputs, outputs), _pieces(checkpoint, source, row_order)):
        parts, squared_error = quantise_rows(values, scheme, dtype)
        error += squared_error
        power += float(np.einsum("nk,nk->", values, values, dtype=np.float64))
        for part, array in parts.items():
            if part not in found:
                found[part] = np.empty((outputs, array.shape[1]), array.dtype)
            found[part][start : start + len(array)] = array
    tensor = Quantised(
        "q4" if scheme.bits == 4 else "q8",
        (outputs, inputs),
        found,
        scheme.zero,
        scheme.group or inputs,
    )
    relative = math.sqrt(error / power) if power else 0.0
    return dataclasses.replace(lay_out(tensor, layout), error=relative)


def _starts(inputs: int, outputs: int) -> range:
    return range(0, outputs, max(1, _PIECE // inputs))


def _pieces(
    checkpoint: Checkpoint, source: str, row_order: npt.NDArray[np.int64] | None
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Some rows of the file at a time: their numbers (n,) there, and values (n, K)."""
    info = checkpoint.tensors[source]
    outputs, inputs = info.shape
    raw = checkpoint.raw(source)
    order = np.arange(outputs) if row_order is None else row_order
    starts = _starts(inputs, outputs)
    for start in starts:
        rows = order[start : start + starts.step]
        piece = raw[start : start + starts.step] if row_order is None else raw[rows]
        yield rows, dequantise(piece, info.type, inputs)
