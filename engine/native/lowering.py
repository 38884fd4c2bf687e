"""Ops → commands of the native library. Pointers come from a place, which knows where buffers lie.

A fused op becomes as few commands as its pattern allows; what has no kernel of its own is done by
several, with temporary buffers in between. Every command computes exactly what the ops do that it
stands for, so fusing changes no bit of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from engine.architectures import Hyperparameters
from engine.native.library import (
    DEQUANTISE,
    FUSED,
    INT8,
    KINDS,
    KV_LAYOUTS,
    KV_SCHEMES,
    PADDED,
    SWIGLU_OUT,
    Cache,
    Command,
)
from engine.native.weights import Weights
from engine.program.ops import Op

QUANTISED = ("q4", "q8", "q4k", "q5k", "q6k")
MOST_WEIGHTS = 3  # of one command


class Place(Protocol):
    """Where buffers lie. Addresses are of float32 rows."""

    def read(self, name: str) -> int: ...

    def write(self, name: str, width: int) -> int: ...

    def width(self, name: str) -> int: ...

    def cache(self, keys: str, values: str) -> Cache: ...


class Lowering:
    """Makes commands for the ops of one package. `name`: what a crash record calls an op by."""

    def __init__(
        self, weights: Weights, hp: Hyperparameters, name: Callable[[str], int] | None = None
    ) -> None:
        self.weights, self.hp, self._name = weights, hp, name

    def lower(self, op: Op, place: Place, index: int = 0) -> list[Command]:
        """The commands of `op`, marked as those of op number `index`.

        Raises ValueError for what the kernels cannot do, naming the op.
        """
        parts, commands, at = op.parts, [], 0
        inside = {name for part in parts for name in part.writes} - set(op.writes)
        while at < len(parts):
            made, used = self._next(parts[at:], inside, place)
            commands += made
            at += used
        for command in commands:
            command.op = index
            command.name = self._name(op.id) if self._name is not None else 0
        return commands

    def _next(
        self, parts: Sequence[Op], inside: Collection[str], place: Place
    ) -> tuple[list[Command], int]:
        """Commands for as many of the first parts as one pattern covers, and how many those are."""
        first = parts[0]
        if first.kind == "rmsnorm" and "heads" not in first.attributes:
            linears = self._sharing(parts[1:], first.writes[0])
            if linears and first.writes[0] in inside:
                made, used = self._linears(linears, parts[1 + len(linears) :], inside, place, first)
                return made, 1 + used
        if first.kind == "linear":
            linears = self._sharing(parts, first.reads[0])
            return self._linears(linears, parts[len(linears) :], inside, place, None)
        if [part.kind for part in parts[:3]] == ["rope", "kv_append", "attention"]:
            rope, append, attention = parts[:3]
            if set(rope.writes) <= set(inside):
                return [self._attention(attention, place, rope, append)], 3
        return [self._single(first, place)], 1

    def _sharing(self, parts: Sequence[Op], source: str) -> list[Op]:
        """The linears at the start that read the same input, as many as one command takes."""
        found: list[Op] = []
        for part in parts[:MOST_WEIGHTS]:
            same = part.kind == "linear" and part.reads[0] == source
            if not same or (found and self._mode(part) != self._mode(found[0])):
                break
            found.append(part)
        return found

    def _mode(self, op: Op) -> int:
        """Flags of a linear: how it takes activations and weights."""
        scheme = self.weights.package.tensors[op.weights[0]].scheme
        activations = op.attributes.get("activations", "float")
        int8 = activations == "int8"
        if activations not in ("int8", "float") or (int8 and scheme not in QUANTISED):
            raise ValueError(
                f"op {op.id}: {activations} activations with {scheme} weights; the native kernels "
                "take float with all and int8 with quantised ones"
            )
        before = op.attributes.get("dequantise", "inside") == "before"
        return (INT8 if int8 else 0) | (DEQUANTISE if before else 0)

    def _linears(
        self,
        linears: Sequence[Op],
        after: Sequence[Op],
        inside: Collection[str],
        place: Place,
        norm: Op | None,
    ) -> tuple[list[Command], int]:
        """One command for linears of one input, with the norm before and what may follow."""
        source = norm.reads[0] if norm else linears[0].reads[0]
        command = self._command("linear", count=len(linears), width=place.width(source))
        command.flags = self._mode(linears[0])
        command.x = place.read(source)
        if norm:
            command.norm, command.eps = self.weights.vector(norm.weights[0]), self.hp.rms_eps
        outputs = []
        for number, op in enumerate(linears):
            weight = self.weights.matrix(op.weights[0])
            if weight.k != command.width:
                raise ValueError(f"op {op.id}: weight of {weight.k} inputs, given {command.width}")
            command.w[number] = ctypes.pointer(weight)
            if len(op.weights) > 1:
                command.bias[number] = self.weights.vector(op.weights[1])
            outputs.append((op.writes[0], weight.n))
        used = len(linears)
        following = after[0] if after else None
        if following is not None and following.kind == "swiglu":
            names = [name for name, _ in outputs]
            if list(following.reads) == names and set(names) <= set(inside):
                command.flags |= SWIGLU_OUT
                outputs.insert(0, (following.writes[0], outputs[0][1]))
                used += 1
        elif following is not None and following.kind == "add" and len(linears) == 1:
            name, width = outputs[0]
            others = [other for other in following.reads if other != name]
            if name in inside and len(others) == 1:
                command.residual = place.read(others[0])
                outputs[0] = (following.writes[0], width)
                used += 1
        for number, (name, width) in enumerate(outputs):
            command.out[number] = place.write(name, width)
        return [command], used

    def _single(self, op: Op, place: Place) -> Command:
        """An op alone."""
        if op.kind == "attention":
            return self._attention(op, place, None, None)
        command = self._command(op.kind)
        if op.kind == "embed":
            weight = self.weights.matrix(op.weights[0])
            command.w[0] = ctypes.pointer(weight)
            command.out[0] = place.write(op.writes[0], weight.k)
            return command
        if op.kind == "kv_append":
            self._heads(command)
            command.x, command.x2 = place.read(op.reads[0]), place.read(op.reads[1])
            command.cache = ctypes.pointer(place.cache(*op.writes))
            return command
        width = place.width(op.reads[0])
        command.x = place.read(op.reads[0])
        if op.kind == "rope":
            self._heads(command)
            self._rope(command, op)
            command.x2 = place.read(op.reads[1])
            for number, (name, source) in enumerate(zip(op.writes, (0, 1, 0))):
                command.out[number] = place.write(name, place.width(op.reads[source]))
            return command
        command.width = width
        if op.kind == "rmsnorm":
            command.count = op.attributes.get("heads", 1)
            command.width = width // command.count
            command.norm, command.eps = self.weights.vector(op.weights[0]), self.hp.rms_eps
        elif op.kind in ("add", "swiglu"):
            command.x2 = place.read(op.reads[1])
        elif op.kind != "select":
            raise ValueError(f"op {op.id}: the native unit has no kernel for {op.kind}")
        command.out[0] = place.write(op.writes[0], width)
        return command

    def _attention(self, op: Op, place: Place, rope: Op | None, append: Op | None) -> Command:
        command = self._command("attention")
        self._heads(command)
        queries, keys, values, _, _, *prefix = op.reads
        command.keep = op.attributes.get("keep", 0)
        command.cache = ctypes.pointer(place.cache(keys, values))
        if op.attributes.get("buckets") == 0:
            command.flags |= PADDED
        if rope is not None and append is not None:
            command.flags |= FUSED
            self._rope(command, rope)
            command.x, command.x2 = place.read(rope.reads[0]), place.read(rope.reads[1])
            command.x3 = place.read(append.reads[1])
        else:
            command.x = place.read(queries)
            if prefix:
                command.x4 = place.read(prefix[0])
        command.out[0] = place.write(op.writes[0], self.hp.heads * self.hp.head_dim)
        return command

    def _command(self, kind: str, **fields: int) -> Command:
        return Command(kind=KINDS.index(kind), **fields)

    def _heads(self, command: Command) -> None:
        command.heads, command.kv_heads = self.hp.heads, self.hp.kv_heads
        command.head_dim = self.hp.head_dim

    def _rope(self, command: Command, op: Op) -> None:
        command.inv_freq = self.weights.vector(op.weights[0])
        command.rope_scale = self.hp.rope_scale


def cache_structure(keys: Any, values: Any, name: str) -> Cache:
    """One layer's cache: two views of engine.runtime.cache, or two plain float32 arrays
    (B·S, K, D). Raises ValueError for anything else."""
    slots, kv_heads, head_dim = keys.shape
    structure = Cache(kv_heads=kv_heads, head_dim=head_dim)
    plain = not hasattr(keys, "scheme")
    scheme = "f32" if plain else keys.scheme
    layouts = ("numpy", "numpy") if plain else (keys.layout, values.layout)
    structure.scheme = KV_SCHEMES.index(scheme)
    structure.key_layout, structure.value_layout = map(KV_LAYOUTS.index, layouts)
    structure.slots = slots if plain else keys.slots
    structure.sequences = slots // structure.slots
    multiple = 32 if scheme == "int4" else 16
    if head_dim % multiple:
        raise ValueError(
            f"{name}: heads of {head_dim} elements; the native attention needs a multiple of "
            f"{multiple} with a cache in {scheme}: choose another kv, or unit packed"
        )
    if plain and (keys.dtype != "float32" or not keys.flags.c_contiguous):
        raise ValueError(f"{name}: a cache of {keys.dtype}; the native unit needs float32")
    for part, view in (("k", keys), ("v", values)):
        data, scale = (view, None) if plain else (view.data, view.scale)
        setattr(structure, part, data.ctypes.data)
        setattr(structure, f"{part}_scale", None if scale is None else scale.ctypes.data)
    return structure
