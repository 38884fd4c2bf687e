"""The package: one file with everything a board needs of a model, mapped read-only.

    magic "DECODPK2" | u64 offset of the header | u64 its length | u64 size of the file
    | tensors, each part 64-byte aligned | tokenizer (JSON) | header (JSON)

The header holds the hyper-parameters, the scheme, layout, group and parts (dtype, shape, offset) of
every tensor, and where the tokenizer lies. It comes last because what it says is known only when
the tensors are made, one at a time. The file's size stands in front, so that a cut file is refused
before anything is mapped. Offsets count from the start of the file. Integers are little-endian.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from engine.architectures import Hyperparameters, ModelLayout, family_of
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.quantize.plan import QuantPlan
from engine.quantize.repack import Repacked
from engine.quantize.schemes import BITS, PackedTensor, part_forms

MAGIC = b"DECODPK2"
ALIGNMENT = 64
FRONT = struct.Struct("<8sQQQ")
MAX_HEADER = 256 << 20  # bytes; far beyond that of a model with thousands of tensors
DTYPES: Mapping[str, type[np.generic]] = {
    "f8": np.float64,
    "f4": np.float32,
    "f2": np.float16,
    "u2": np.uint16,
    "i1": np.int8,
    "u1": np.uint8,
}


class PackageError(ValueError):
    """A package that cannot be read: names the file and the field."""


@dataclasses.dataclass(frozen=True)
class PackageInfo:
    """What `build_package` made. `sha256` is of the whole file."""

    path: Path
    sha256: str
    bytes: int
    name: str
    scheme: str
    notes: tuple[str, ...]
    hyperparameters: Hyperparameters
    errors: Mapping[str, float]  # relative, of the tensors that were quantised here


class Package:
    """An opened package. Its arrays are views of the mapping; nothing is copied to the heap."""

    def __init__(self, path: Path, header: Mapping[str, Any], mapping: mmap.mmap) -> None:
        self.path, self._mapping = path, mapping
        try:
            self.name = str(header["name"])
            self.scheme = str(header["scheme"])
            self.layout = str(header["layout"])
            self.notes = tuple(str(note) for note in header["notes"])
            self.errors = {str(key): float(value) for key, value in header["errors"].items()}
            self.hyperparameters = Hyperparameters.from_json(header["hyperparameters"])
            self._tokenizer = (
                int(header["tokenizer"]["offset"]),
                int(header["tokenizer"]["bytes"]),
            )
            self.tensors: Mapping[str, PackedTensor] = {
                name: _tensor(mapping, name, spec) for name, spec in header["tensors"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise PackageError(f"{path}: header field {error} is missing or malformed") from error
        except ValueError as error:
            raise PackageError(f"{path}: {error}") from error

    @staticmethod
    def open(path: Path | str) -> Package:
        """Raises PackageError for a file that is missing, cut, of another version or damaged."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = _read_header(path, file)
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise PackageError(f"{path}: cannot be opened: {error.strerror}") from error
        return Package(path, header, mapping)

    @functools.cached_property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """What engine.tokenizer.Tokenizer takes. Parsed on first use: boards work on token ids."""
        offset, size = self._tokenizer
        if offset < 0 or size < 0 or offset + size > len(self._mapping):
            raise PackageError(
                f"{self.path}: tokenizer at {offset}, {size} bytes: outside the file"
            )
        try:
            found = json.loads(self._mapping[offset : offset + size])
        except ValueError as error:
            raise PackageError(f"{self.path}: tokenizer is not JSON: {error}") from error
        if found is not None and not isinstance(found, dict):
            raise PackageError(f"{self.path}: tokenizer is {type(found).__name__}, not an object")
        return found

    def offset_of(self, part: npt.NDArray[np.generic]) -> int:
        """Where in the file a part of one of its tensors begins, in bytes."""
        base = np.frombuffer(self._mapping, np.uint8).ctypes.data
        return int(part.ctypes.data - base)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all tensors, an untied embedding excepted."""
        tied = self.hyperparameters.tied
        return sum(t.nbytes for name, t in self.tensors.items() if tied or name != "embed")

    def close(self) -> None:
        """Drops the views; the mapping ends when the last array that was handed out does."""
        self.tensors = {}
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(path: Path, file: BinaryIO) -> Mapping[str, Any]:
    size = os.fstat(file.fileno()).st_size
    front = file.read(FRONT.size)
    if front[: len(MAGIC)] != MAGIC:
        older = front[: len(MAGIC) - 1] == MAGIC[:-1]
        question = "it was made by another version" if older else "is it a package?"
        raise PackageError(
            f"{path}: begins with {front[: len(MAGIC)]!r}, expected {MAGIC!r}; {question} "
            "`engine pack MODEL PACKAGE` makes one"
        )
    if len(front) < FRONT.size:
        raise PackageError(f"{path}: file has {size} bytes, cut in its first field; copy it again")
    _, offset, length, wanted = FRONT.unpack(front)
    if size != wanted:
        raise PackageError(f"{path}: file has {size} bytes, it says {wanted}; copy it again")
    if length > MAX_HEADER or offset + length > size:
        raise PackageError(
            f"{path}: header at {offset}, {length} bytes, in a file of {size}; copy it again"
        )
    file.seek(offset)
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise PackageError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise PackageError(f"{path}: header is {type(header).__name__}, expected an object")
    return header


def _tensor(mapping: mmap.mmap, name: str, spec: Mapping[str, Any]) -> PackedTensor:
    scheme, layout = str(spec["scheme"]), str(spec["layout"])
    shape, group = tuple(int(n) for n in spec["shape"]), int(spec["group"])
    try:
        forms = part_forms(scheme, layout, shape, group)
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from error
    needed = {part for part, form in forms.items() if not form.optional}
    found = set(spec["parts"])
    if not needed <= found <= set(forms):
        raise ValueError(f"tensor {name!r}: parts {sorted(found)}, expected {sorted(needed)}")
    parts = {part: _view(mapping, name, part, at) for part, at in spec["parts"].items()}
    for part, array in parts.items():
        form = forms[part]
        if array.shape != form.shape or array.dtype not in form.dtypes:
            expected = " or ".join(str(np.dtype(dtype)) for dtype in form.dtypes)
            raise ValueError(
                f"tensor {name!r}: part {part!r} is {array.dtype} {array.shape}, expected "
                f"{expected} {form.shape} for scheme {scheme}, layout {layout}, group {group}"
            )
    return PackedTensor(name, scheme, shape, parts, int(spec["zero"]), layout, group)


def _view(
    mapping: mmap.mmap, name: str, part: str, spec: Mapping[str, Any]
) -> npt.NDArray[np.generic]:
    dtype = np.dtype(DTYPES[spec["dtype"]])
    shape = tuple(int(n) for n in spec["shape"])
    offset = int(spec["offset"])
    count = 1
    for n in shape:
        count *= n
    end = offset + count * dtype.itemsize
    if min(shape, default=1) < 1 or offset < 0 or end > len(mapping):
        raise ValueError(
            f"tensor {name!r}: part {part!r} lies at {offset}..{end}, "
            f"the file has {len(mapping)} bytes"
        )
    if offset % ALIGNMENT:
        raise ValueError(f"tensor {name!r}: part {part!r} at {offset} is not 64-byte aligned")
    flat = np.frombuffer(mapping, dtype=dtype, count=count, offset=offset)
    return flat.reshape(shape)


def build_package(
    checkpoint: Checkpoint,
    path: Path,
    *,
    name: str,
    layout: str = "blocked",
    scheme: str | None = None,
    keep: Sequence[str] | None = None,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackageInfo:
    """Write `checkpoint` as a package; `progress(done, total)` counts tensors.

    `layout` is that of its quantised tensors (engine.quantize.schemes). `scheme` None moves them
    without loss where a scheme of ours holds them; `w4-128` and the like quantise matrices, those
    excepted that a pattern of `keep` names, and `strict` refuses shapes that do not fit
    (engine.quantize.plan). The file appears under its name only when it is whole.
    Raises FormatError for a checkpoint that is incomplete, of an unknown architecture, not finite
    or, with `strict`, of a shape that the scheme cannot hold; ValueError for a layout, scheme or
    pattern that does not exist; OSError for the disk.
    """
    plan = QuantPlan.parse(layout, scheme, keep, strict)
    model = _layout(checkpoint)
    plan.check(model.sources)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w+b") as file:
            header, digest = _write(checkpoint, model, plan, name, file, progress)
            size = file.tell()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return PackageInfo(
        path,
        digest,
        size,
        name,
        header["scheme"],
        tuple(header["notes"]),
        model.hyperparameters,
        header["errors"],
    )


def _layout(checkpoint: Checkpoint) -> ModelLayout:
    try:
        return family_of(checkpoint).read(checkpoint)
    except FormatError:
        raise
    except ValueError as error:  # numbers that make no model or no RoPE
        raise FormatError(f"{checkpoint.path}: {error}") from error


def _write(
    checkpoint: Checkpoint,
    model: ModelLayout,
    plan: QuantPlan,
    name: str,
    file: BinaryIO,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, Any], str]:
    """The whole file, one tensor at a time in memory; returns the header and the file's SHA-256."""
    specs: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}  # note → tensors that it is about
    errors: dict[str, float] = {}
    kinds: dict[str, int] = {}

    def put(target: str, source: str, shape: tuple[int, ...], tensor: Repacked) -> None:
        parts = {part: _put(file, array) for part, array in tensor.parts.items()}
        specs[target] = {
            "scheme": tensor.scheme,
            "shape": shape,
            "layout": tensor.layout,
            "group": tensor.group,
            "zero": tensor.zero,
            "parts": parts,
        }
        kinds[tensor.scheme] = kinds.get(tensor.scheme, 0) + int(np.prod(shape))
        if tensor.note:
            reasons.setdefault(tensor.note, []).append(source)
        if tensor.error is not None:
            errors[target] = tensor.error

    file.write(bytes(ALIGNMENT))
    for done, (target, source) in enumerate(model.sources.items(), 1):
        made = plan.make(checkpoint, target, source, _row_order(model, target))
        put(target, source, checkpoint.tensors[source].shape, made)
        if progress:
            progress(done, len(model.sources))
    frequencies = model.inverse_frequencies
    put("rope.inv_freq", "", frequencies.shape, Repacked("f64", {"data": frequencies}))
    tokenizer = json.dumps(checkpoint.tokenizer, separators=(",", ":")).encode()
    header = {
        "name": name,
        "scheme": _scheme_name(kinds),
        "layout": plan.layout,
        "notes": [*model.notes, *map(_note, reasons.values(), reasons), *_summary(errors)],
        "errors": errors,
        "hyperparameters": model.hyperparameters.to_json(),
        "tokenizer": {"offset": file.tell(), "bytes": len(tokenizer)},
        "tensors": specs,
    }
    file.write(tokenizer)
    offset = file.tell()
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write(text)
    size = file.tell()
    file.seek(0)
    file.write(FRONT.pack(MAGIC, offset, len(text), size))
    file.flush()
    os.fsync(file.fileno())
    return header, _sha256(file)


def _note(names: list[str], reason: str) -> str:
    """One line, however many tensors it is about."""
    shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return f"{', '.join(shown)}: {reason}"


def _summary(errors: Mapping[str, float]) -> list[str]:
    if not errors:
        return []
    worst, middle = max(errors, key=errors.__getitem__), np.median(list(errors.values()))
    return [
        f"{len(errors)} tensors quantised here, relative error {middle:.1e} in the middle, "
        f"{errors[worst]:.1e} at most ({worst})"
    ]


def _put(file: BinaryIO, array: npt.NDArray[Any]) -> dict[str, Any]:
    """Write a part; returns what the header says of it."""
    offset = file.tell()
    file.write(np.ascontiguousarray(array).data.cast("B"))
    file.write(bytes(-array.nbytes % ALIGNMENT))
    return {"dtype": array.dtype.str[1:], "shape": list(array.shape), "offset": offset}


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 22):
        digest.update(piece)
    return digest.hexdigest()


def _scheme_name(kinds: Mapping[str, int]) -> str:
    """For people: the scheme that most weights have, with the others behind it."""
    names = {"q4": "W4", "q8": "W8", "q4k": "Q4_K", "q5k": "Q5_K", "q6k": "Q6_K"}
    order = sorted((k for k in kinds if k in BITS), key=lambda kind: -kinds[kind])
    shares = [
        names.get(kind, kind.upper()) for kind in order if kinds[kind] * 100 >= sum(kinds.values())
    ]
    return "+".join(shares)


def _row_order(layout: ModelLayout, target: str) -> npt.NDArray[np.int64] | None:
    """Rows of q and k from neighbours-rotated (2i, 2i+1) to halves-rotated (i, i + D/2) order."""
    hp = layout.hyperparameters
    part = target.split(".", 1)[-1]
    if not layout.unpermute_qk or part.split(".bias")[0] not in ("attn.q", "attn.k"):
        return None
    heads = hp.heads if part.startswith("attn.q") else hp.kv_heads
    order = np.arange(heads * hp.head_dim, dtype=np.int64)
    return order.reshape(heads, hp.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
