"""A decode step as data: ops with declared reads and writes, in program order.

Buffers have names, and each is written by exactly one op of a step (KV caches excepted: they live
across steps). That single assignment is what taps, alignment and the happens-before check rely on;
which memory a buffer lies in is the runtime's business.

A `fused` op stands for several ops that one kernel may do together. Its parts are those ops, in
order, and running them one by one is its definition: what it reads is what they read from outside,
what it writes is what anybody else reads of them. The buffers between them exist only inside.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

# What a unit has to know, beside `fused`, which any unit may run part by part.
KINDS = (
    "embed",
    "rmsnorm",
    "linear",
    "rope",
    "kv_append",
    "attention",
    "swiglu",
    "add",
    "select",
)
FUSED = "fused"


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation. `id` reads like a path: `L07.attn.q`, `L07.ffn.down`, `head.logits`."""

    id: str
    kind: str
    reads: tuple[str, ...]  # buffers
    writes: tuple[str, ...]  # buffers
    weights: tuple[str, ...] = ()  # tensors of the package
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer(self) -> int | None:
        """The transformer layer, or None for the embedding and the head."""
        head = self.id.split(".", 1)[0]
        return int(head[1:]) if head[:1] == "L" and head[1:].isdigit() else None

    @property
    def parts(self) -> tuple[Op, ...]:
        """The ops that a fused op stands for, in order; of any other op, itself."""
        return tuple(self.attributes["parts"]) if self.kind == FUSED else (self,)

    @property
    def appends(self) -> tuple[str, ...]:
        """Caches of which it writes the slots of this step's tokens and leaves the rest."""
        return tuple(
            name for part in self.parts if part.kind == "kv_append" for name in part.writes
        )

    @property
    def slots(self) -> str:
        """The buffer that says which slots it appends to. ValueError when it appends none."""
        for part in self.parts:
            if part.kind == "kv_append":
                return part.reads[2]
        raise ValueError(f"op {self.id} appends to no cache")

    def inner(self, op_id: str) -> Op | None:
        """The part with this id, or the op itself; None when it has neither."""
        found = [part for part in self.parts if part.id == op_id]
        return found[0] if found else self if self.id == op_id else None


@dataclasses.dataclass(frozen=True)
class Program:
    """The ops of one decode step, in an order that respects their reads and writes.

    `inputs` are buffers the caller fills, all int64: `tokens` and `positions` (T,), `rows` (R,) the
    rows of T whose logits are wanted, and where keys and values lie. `output` is the logits buffer,
    (R, V). `caches` are written and read across steps.
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    output: str
    caches: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs) | set(self.caches)
        inside: set[str] = set()  # written by parts of fused ops
        seen: set[str] = set()
        for op in self.ops:
            if op.kind == FUSED:
                _check_fused(op, self.caches)
            elif op.kind not in KINDS:
                raise ValueError(f"op {op.id}: unknown kind {op.kind!r}, known: {sorted(KINDS)}")
            # A fused op may be called like one of its own parts, which is usually its last product.
            for op_id in {op.id, *(part.id for part in op.parts)}:
                if op_id in seen:
                    raise ValueError(f"op {op_id}: its id is used twice in one program")
                seen.add(op_id)
            missing = [name for name in op.reads if name not in known]
            if missing:
                hint = f"; a fused op keeps {missing[0]!r} inside" if missing[0] in inside else ""
                raise ValueError(
                    f"op {op.id} reads {missing[0]!r}, which no earlier op writes{hint}"
                )
            written = {name for part in op.parts for name in part.writes}
            for name in sorted(written):
                if name in known | inside and name not in self.caches:
                    raise ValueError(f"op {op.id} writes {name!r}, which an earlier op wrote")
            known.update(op.writes)
            inside |= written - set(op.writes)
        if self.output not in known:
            raise ValueError(f"program output {self.output!r} is written by no op")

    def op(self, op_id: str) -> Op:
        """The op of that id, or else the part of a fused one.

        Raises KeyError naming the nearest ids when there is no such op.
        """
        for op in self.ops:
            if op.id == op_id:
                return op
        for part in self.flat():
            if part.id == op_id:
                return part
        raise KeyError(f"no op {op_id!r} in this program{self.near(op_id)}")

    def flat(self) -> Iterator[Op]:
        """All ops with fused ones replaced by their parts."""
        for op in self.ops:
            yield from op.parts

    def near(self, op_id: str) -> str:
        """`; near: …` with the ids most like an unknown one, for the end of an error; or nothing.

        The same op of other layers comes first, then what is spelled alike.
        """
        ids = list(dict.fromkeys([op.id for op in self.ops] + [part.id for part in self.flat()]))
        tail = op_id.split(".")[-1]
        alike = [name for name in ids if name.split(".")[-1] == tail][:3]
        alike += difflib.get_close_matches(op_id, ids, n=3)
        return f"; near: {', '.join(dict.fromkeys(alike))}" if alike else ""


def fuse(program: Program, groups: Mapping[str, Iterable[Op]]) -> Program:
    """The program with each group of its ops replaced by one fused op, at its last op's place.

    `groups` maps the fused op's id to ops of the program in program order, fused ones among them
    giving their parts. Without groups the program is returned as it is. Raises ValueError when ops
    between them depend on one that moves.
    """
    members = {op.id: fused for fused, ops in groups.items() for op in ops}
    if not members:
        return program
    wanted: dict[str, set[str]] = {fused: set() for fused in groups}
    for op in program.ops:
        for fused, names in wanted.items():
            if members.get(op.id) != fused:
                names.update(op.reads)
    pending: dict[str, list[Op]] = {fused: [] for fused in groups}
    sizes = Counter(members.values())
    ops: list[Op] = []
    for op in program.ops:
        group = members.get(op.id)
        if group is None:
            # What it needs of a fused op further on shows in the new program; an append does not.
            for fused, earlier in pending.items():
                late = [part for part in earlier if set(part.appends) & {*op.reads, *op.writes}]
                if late and len(earlier) < sizes[fused]:
                    raise ValueError(
                        f"op {op.id} needs {late[0].id}, which {fused} would do after it"
                    )
            ops.append(op)
            continue
        pending[group].append(op)
        if len(pending[group]) == sizes[group]:
            kept = wanted[group] | {program.output, *program.caches}
            parts = [part for member in pending[group] for part in member.parts]
            ops.append(fused_op(group, parts, kept, program.caches))
    return dataclasses.replace(program, ops=tuple(ops))


def fused_op(op_id: str, parts: Iterable[Op], kept: Collection[str], caches: Collection[str]) -> Op:
    """One op for `parts`; of what they write, the buffers in `kept` stay visible."""
    parts = tuple(parts)
    reads, writes = _outside(parts, caches)
    weights = tuple(dict.fromkeys(name for part in parts for name in part.weights))
    visible = tuple(name for name in writes if name in kept)
    return Op(op_id, FUSED, reads, visible, weights, {"parts": parts})


def _outside(
    parts: Iterable[Op], caches: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What ops in order read that none of them writes before, and all they write.

    A cache that they append to and then read is read from outside too: most of its slots are.
    """
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for part in parts:
        for name in part.reads:
            if name not in writes or name in caches:
                reads[name] = None
        writes.update(dict.fromkeys(part.writes))
    return tuple(reads), tuple(writes)


def _check_fused(op: Op, caches: Collection[str]) -> None:
    """Raises ValueError when a fused op says something else than its parts."""
    parts = tuple(op.attributes.get("parts", ()))
    if not parts or not all(isinstance(part, Op) for part in parts):
        raise ValueError(f"op {op.id}: a fused op needs its parts, found {parts!r}")
    for part in parts:
        if part.kind not in KINDS:
            raise ValueError(f"op {op.id}: part {part.id} has kind {part.kind!r}, known: {KINDS}")
    ids = [part.id for part in parts]
    if len(set(ids)) != len(ids):
        raise ValueError(f"op {op.id}: a part's id is used twice: {', '.join(ids)}")
    reads, writes = _outside(parts, caches)
    if set(op.reads) != set(reads):
        raise ValueError(
            f"op {op.id} reads {sorted(op.reads)}, its parts read {sorted(reads)} from outside"
        )
    invented = sorted(set(op.writes) - set(writes))
    if invented:
        raise ValueError(f"op {op.id} writes {invented[0]!r}, which none of its parts writes")
    hidden = sorted(set(writes) & set(caches) - set(op.writes))
    if hidden:
        raise ValueError(f"op {op.id} does not say that it writes the cache {hidden[0]!r}")
    weights = {name for part in parts for name in part.weights}
    if set(op.weights) != weights:
        raise ValueError(
            f"op {op.id} has the weights {sorted(op.weights)}, its parts have {sorted(weights)}"
        )
