"""The native library as Python sees it: where it is found, its structures and its functions.

Found, in this order: the file that $ENGINE_NATIVE_LIB names, `native_lib/libdecode_native.so`
beside the engine (what a deployment brings to a board), or a build for this computer where a
compiler is at hand.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from engine import crashing
from engine.native.compilers import BuildError
from engine.native.features import CpuFeatures, detect
from engine.native.isa import OVERRIDE, Choice, UnknownIsa, choose

VARIABLE = "ENGINE_NATIVE_LIB"
DEPLOYED = Path("native_lib") / "libdecode_native.so"

SCHEMES = ("f32", "f16", "bf16", "q4", "q8", "q4k", "q5k", "q6k")
LAYOUTS = ("row", "blocked", "interleaved")
KV_SCHEMES = ("f32", "f16", "int8", "int4")
KV_LAYOUTS = ("sd", "ds", "numpy")
KINDS = (
    "embed", "rmsnorm", "linear", "rope", "kv_append", "attention", "swiglu", "add", "select",
)  # fmt: skip
ROWS_R, INT8, SWIGLU_OUT, DEQUANTISE, FUSED, PADDED = 1, 2, 4, 8, 16, 32


class NativeUnavailable(ValueError):
    """There is no native library for this process: says where it was looked for."""


class Weight(ctypes.Structure):
    """dn_weight of src/dn.h; so are the others."""

    _fields_ = [
        *((name, c_int32) for name in ("scheme", "layout", "n", "k", "group", "zero")),
        ("scale_f32", c_int32),
        ("unused", c_int32),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("q", "h", "d", "m", "s", "mn", "dm")),
    ]


class Cache(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("scheme", "key_layout", "value_layout", "kv_heads")),
        ("head_dim", c_int32),
        ("sequences", c_int32),
        ("slots", c_int64),
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
    ]


class Command(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kind", "flags", "op", "count", "width")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "keep")),
        ("eps", c_float),
        ("rope_scale", c_float),
        ("name", c_int32),
        *((name, c_void_p) for name in ("x", "x2", "x3", "x4")),
        ("out", c_void_p * 3),
        ("norm", c_void_p),
        ("residual", c_void_p),
        ("bias", c_void_p * 3),
        ("w", POINTER(Weight) * 3),
        ("cache", POINTER(Cache)),
        ("inv_freq", c_void_p),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("tokens", c_int32),
        ("rows", c_int32),
        *((name, c_void_p) for name in ("ids", "positions", "row_index", "slots", "starts")),
        ("visible", c_void_p),
        ("prefix_positions", c_void_p),
        ("bad_op", c_int32),
        ("overflow", c_int32),
    ]


class Event(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("step", "op", "start_ns", "end_ns")]


# name → result, arguments
_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "dn_team_create": (c_void_p, (c_int32, c_void_p, c_char_p)),
    "dn_team_destroy": (None, (c_void_p,)),
    "dn_team_threads": (c_int32, (c_void_p,)),
    "dn_reserve": (c_int32, (c_void_p, c_void_p)),
    "dn_run": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p)),
    "dn_trace": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "dn_touch": (c_uint64, (c_void_p, c_int64, c_int64)),
    "dn_read_bandwidth": (
        c_int32,
        (c_int32, c_int64, c_int32, c_int32, c_int32, c_int32, POINTER(c_double)),
    ),
    "dn_isas": (c_char_p, ()),
    "dn_hwcap": (c_uint64, (c_int32,)),
    "dn_sizes": (None, (c_void_p,)),
    "dn_crash_record": (c_int32, (c_int32,)),
    "dn_crash_name": (c_int32, (c_char_p,)),
}


_names: dict[str, int] = {}  # op ids that the library knows: it keeps them once for a process


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library. `features` are common to all CPUs that this process may use."""

    path: Path
    functions: ctypes.CDLL
    features: CpuFeatures
    isas: tuple[str, ...]  # that it was built for

    def read_rates(
        self, threads: int, size: int, streams: int, prefetch: int, huge: bool, passes: int
    ) -> list[float]:
        """GB/s of each pass of reading a block of `size` bytes with `threads` threads; [] when the
        memory or the threads cannot be had. The first pass still writes back what was filled."""
        rates = (c_double * passes)()
        read = self.functions.dn_read_bandwidth
        failed = read(threads, size, streams, prefetch, int(huge), passes, rates)
        return [] if failed else list(rates)

    def name(self, op_id: str) -> int:
        """What commands name an op by, for the record of a crash."""
        if op_id not in _names:
            _names[op_id] = int(self.functions.dn_crash_name(op_id.encode()))
        return _names[op_id]

    def choose(self, override: str | None = None) -> Choice:
        """The kernels to use: `override`, else $ENGINE_KERNELS, else the best for the CPUs.

        Raises ValueError for a name that this library has no kernels of.
        """
        wanted = override or os.environ.get(OVERRIDE) or None
        choice = choose(self.features.common, wanted)
        if choice.name not in self.isas:
            raise UnknownIsa(
                f"{self.path} has no {choice.name} kernels, it has {', '.join(self.isas)}; "
                "build it for this machine"
            )
        return choice


def find() -> Path:
    """The library's file. Raises NativeUnavailable naming every place that was tried."""
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise NativeUnavailable(f"{VARIABLE} is {named!r}, which is no file; unset it or build")
        return path
    for folder in sys.path:
        path = Path(folder or ".") / DEPLOYED
        if path.is_file():
            return path
    from engine.native.build import build_local  # a board has no compiler, and no use for this

    try:
        return build_local()
    except BuildError as error:
        raise NativeUnavailable(
            f"no native library: {VARIABLE} is not set, {DEPLOYED} is not on the path, and it "
            f"cannot be built here: {error}; use another unit (unit: packed)"
        ) from error


@functools.lru_cache(maxsize=1)
def load() -> Library:
    """The library, loaded once. Raises NativeUnavailable without one, or with one of another
    version."""
    path = find()
    try:
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, list(arguments)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path}: cannot be loaded: {error}; build it again") from error
    found = (c_int64 * 5)()
    functions.dn_sizes(found)
    expected = [ctypes.sizeof(kind) for kind in (Weight, Cache, Command, Step, Event)]
    if list(found) != expected:
        raise NativeUnavailable(
            f"{path}: structures of {list(found)} bytes, expected {expected}; it belongs to other "
            "sources: build it again"
        )
    crashing.begin(functions)
    isas = tuple(functions.dn_isas().decode().split(","))
    return Library(path, functions, detect(), isas)
