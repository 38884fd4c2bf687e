"""Does a model fit a board, how fast can it be at most, and which scheme is tried first?

Pure functions of the model's hyper-parameters and of what is known about the board: nothing has to
be packed, sent or run. The memory is that of `engine.measure.memory`, which also refuses a model
before it is loaded. The speed is a ceiling: a token reads every weight once, and the keys and
values of all cached positions, as fast as the board reads memory at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from engine.architectures import Hyperparameters
from engine.measure.memory import Limits, Need, exceeded, need
from engine.options import EngineOptions
from engine.runtime.cache import estimate_bytes

KV_SCHEMES = ("f16", "int8", "int4")
# Engines reach this share of the ceiling without much tuning; budgets are compared with it.
REACHED = 0.6
_FLOAT_BITS = 32  # of norms and biases
WORDS = {
    "budget": "memory_mb of the budget",
    "memory": "the board's memory less what its system keeps",
    "data": "a process's own limit",
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Bits of a weight, scales included. `head_bits` are those of the embedding and the head, which
    keep precision at 4 bits (engine.quantize.plan)."""

    name: str
    bits: float
    head_bits: float
    what: str


SCHEMES = (
    Scheme("f16", 16.0, 16.0, "as a 16-bit checkpoint is"),
    Scheme("w8", 8.5, 8.5, "8 bits, a 16-bit scale for 32 inputs (as q8_0)"),
    Scheme("w4", 4.5, 8.5, "4 bits, a 16-bit scale for 32 inputs (as q4_0); the head in w8"),
)


@dataclasses.dataclass(frozen=True)
class Own:
    """How the model at hand is stored, and what a token reads of it, in bytes."""

    name: str
    weight_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to store weights, keys and values, at the planned context. MiB and tokens/s; `beyond`
    names the limit that it does not fit, "" when it fits; None: the bandwidth is not known."""

    weights: str
    kv: str
    need: Need
    beyond: str
    longest: int  # context that fits, at most the model's; 0: none
    ceiling_start: float | None  # on an empty cache
    ceiling_end: float | None  # at the end of the planned context

    @property
    def fits(self) -> bool:
        return not self.beyond

    @property
    def name(self) -> str:
        return f"{self.weights} with {self.kv} keys and values"


@dataclasses.dataclass(frozen=True)
class Plan:
    """`choice` is the row to try first, None when none fits; `reason` says why."""

    context: int
    limits: Limits
    bandwidth_gb_s: float | None
    floor: float | None  # tokens/s at the end of the context that the budget asks for
    rows: tuple[Row, ...]
    choice: Row | None
    reason: str


def make_plan(
    hp: Hyperparameters,
    limits: Limits,
    *,
    context: int,
    bandwidth_gb_s: float | None = None,
    floor: float | None = None,
    own: Own | None = None,
    kv_schemes: Sequence[str] = KV_SCHEMES,
) -> Plan:
    """The table and the choice. What is free right now is no limit here: it changes. The choice is
    among KV_SCHEMES, whatever else `kv_schemes` has.
    """
    bounds = dataclasses.replace(limits, available=None)
    stored = [(scheme.name, weight_bytes(hp, scheme)) for scheme in SCHEMES]
    if own is not None:
        stored.insert(0, (own.name, own.weight_bytes))
    rows = tuple(
        _row(hp, bounds, name, size, kv, context, bandwidth_gb_s)
        for name, size in stored
        for kv in kv_schemes
    )
    choice, reason = choose(rows, _order(hp, own), floor)
    return Plan(context, bounds, bandwidth_gb_s, floor, rows, choice, reason)


def _row(
    hp: Hyperparameters,
    limits: Limits,
    name: str,
    size: int,
    kv: str,
    context: int,
    bandwidth: float | None,
) -> Row:
    options = dataclasses.replace(EngineOptions.for_unit("native"), kv=kv)
    wanted = need(hp, size, options, context)
    beyond = exceeded(wanted, limits)
    cached = estimate_bytes(hp, context, kv, options.kv_layout)
    speed = None if bandwidth is None else bandwidth * 1e9
    return Row(
        name,
        kv,
        wanted,
        beyond[0] if beyond else "",
        longest_context(hp, size, options, limits),
        None if speed is None else speed / size,
        None if speed is None else speed / (size + cached),
    )


def longest_context(hp: Hyperparameters, size: int, options: EngineOptions, limits: Limits) -> int:
    """The longest context whose need is within the limits: 0 to the model's own."""
    low, high = 0, hp.context
    while low < high:
        middle = (low + high + 1) // 2
        if exceeded(need(hp, size, options, middle), limits):
            high = middle - 1
        else:
            low = middle
    return low


def matrices(hp: Hyperparameters) -> Iterator[tuple[str, int]]:
    """(name, weights) of every matrix that a token reads: of an untied embedding it reads a row."""
    q, kv = hp.heads * hp.head_dim, hp.kv_heads * hp.head_dim
    for layer in range(hp.layers):
        for name, outputs, inputs in (
            ("attn.q", q, hp.width),
            ("attn.k", kv, hp.width),
            ("attn.v", kv, hp.width),
            ("attn.out", hp.width, q),
            ("ffn.gate", hp.ffn, hp.width),
            ("ffn.up", hp.ffn, hp.width),
            ("ffn.down", hp.width, hp.ffn),
        ):
            yield f"L{layer:02d}.{name}", outputs * inputs
    yield "head", hp.vocab * hp.width


def vectors(hp: Hyperparameters) -> int:
    """Numbers in norms and biases."""
    q, kv = hp.heads * hp.head_dim, hp.kv_heads * hp.head_dim
    layer = 2 * hp.width + (q + 2 * kv) * hp.qkv_bias + hp.width * hp.output_bias
    layer += 2 * hp.head_dim * hp.qk_norm
    return hp.layers * layer + hp.width


def weight_bytes(hp: Hyperparameters, scheme: Scheme) -> int:
    """What a token reads of weights in this scheme, in bytes."""
    bits = sum(
        count * (scheme.head_bits if name == "head" else scheme.bits)
        for name, count in matrices(hp)
    )
    return round((bits + _FLOAT_BITS * vectors(hp)) / 8)


def parameters(hp: Hyperparameters) -> int:
    """Weights that a token reads."""
    return sum(count for _, count in matrices(hp)) + vectors(hp)


def beyond_ceiling(plan: Plan, weights: str, tokens_per_s: float | None) -> str:
    """What to say of a speed on an empty cache that is above its own ceiling; "" of another."""
    tops = [row.ceiling_start for row in plan.rows if row.weights == weights]
    if not tokens_per_s or not tops or tops[0] is None or tokens_per_s <= tops[0]:
        return ""
    return (
        f"Measured {tokens_per_s:.1f} tokens/s are above the ceiling: the read rate was measured "
        "while something else used the board, or the weights lie in a cache."
    )


# --- which one first -------------------------------------------------------------------------


def _order(hp: Hyperparameters, own: Own | None) -> tuple[str, ...]:
    """Names of weight schemes, the first to try in front.

    A file that is quantised already is packed without loss, and no finer scheme brings back what it
    lost. Of a float file w8 reads half the bytes at nearly its accuracy, so that f16 comes only
    after it has shown to lose too much.
    """
    if own is None:
        return ("w8", "w4")
    bits = 8 * own.weight_bytes / parameters(hp)
    quantised = bits < 14  # a float file has 16
    smaller = [s.name for s in SCHEMES if s.name != "f16" and s.bits < bits - 0.6]
    return (own.name, *smaller) if quantised else tuple(smaller)


def choose(
    rows: Sequence[Row], order: Sequence[str], floor: float | None
) -> tuple[Row | None, str]:
    """The row to try first, and why in a sentence or two."""
    by_name = {(row.weights, row.kv): row for row in rows}
    tried = [by_name[name, kv] for name in order for kv in KV_SCHEMES]
    fitting = [row for row in tried if row.fits]
    if not fitting:
        return None, _nothing(rows)
    good = [row for row in fitting if _fast_enough(row, floor)]
    if good:
        found = good[0]
        why = [f"it fits at {found.need.context} positions"]
        if found.weights == order[0] and found.weights not in {s.name for s in SCHEMES}:
            why.append("is packed as it is, without loss")
        elif found.weights == "w8":
            why.append("reads about half the bytes of f16 at nearly its accuracy")
        reason = f"Try {found.name} first: {', '.join(why)}{_speed(found, floor)}."
        before = tried[: tried.index(found)]
        return found, " ".join([reason, *_passed_over(before, floor)])
    found = max(fitting, key=lambda row: row.ceiling_end or 0.0)
    return found, (
        f"Try {found.name} first, the fastest that fits, but expect too little: {REACHED:.0%} of "
        f"its ceiling of {found.ceiling_end:.1f} tokens/s is below the {floor:g} that the budget "
        "asks for. A shorter context, a smaller model or a faster board is needed."
    )


def _fast_enough(row: Row, floor: float | None) -> bool:
    return floor is None or row.ceiling_end is None or REACHED * row.ceiling_end >= floor


def _speed(row: Row, floor: float | None) -> str:
    if row.ceiling_end is None:
        return "; how fast it can be is not known: no bandwidth was measured on this board"
    words = f", and memory allows {row.ceiling_end:.1f} tokens/s there"
    if floor is not None:
        words += f", {REACHED:.0%} of which meets the budget of {floor:g}"
    return words


def _passed_over(before: Sequence[Row], floor: float | None) -> list[str]:
    """Why the schemes in front of the chosen one were not."""
    if not before:
        return []
    first = before[0]
    if not first.fits:
        limit = WORDS[first.beyond]
        return [f"{first.name} needs {first.need.total:.0f} MiB, more than {limit}."]
    return [
        f"{first.name} would be too slow: {REACHED:.0%} of {first.ceiling_end:.1f} tokens/s is "
        f"below {floor:g}."
    ]


def _nothing(rows: Sequence[Row]) -> str:
    least = min(rows, key=lambda row: row.need.total)
    far = max(rows, key=lambda row: row.longest)
    words = (
        f"Nothing fits at {least.need.context} positions: even {least.name} needs "
        f"{least.need.total:.0f} MiB, more than {WORDS[least.beyond]}."
    )
    if far.longest:
        return f"{words} {far.name} fits up to {far.longest} positions."
    return f"{words} No context fits: choose a smaller model or a larger board."
