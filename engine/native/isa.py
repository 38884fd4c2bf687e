"""The instruction sets that kernels are built for, and the choice among them at run time.

`kernels.c` is compiled once for each, with DN_ISA set to its name. To add one: add a row here, and
its kernels in the C sources. `needs` are names of /proc/cpuinfo, as the board's kernel prints them
(Linux: arch/x86/include/asm/cpufeatures.h, arch/arm64/kernel/cpuinfo.c), so that what the operating
system does not support (AVX-512 state, say) counts as missing.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Collection, Mapping

OVERRIDE = "ENGINE_KERNELS"  # the environment's choice of an instruction set


@dataclasses.dataclass(frozen=True)
class Isa:
    """One instruction set. `march` and `flags` are for gcc and clang, `zig` follows `-mcpu=CPU`."""

    name: str
    needs: tuple[str, ...]  # features of the CPU, beyond the machine's baseline
    march: str
    flags: tuple[str, ...] = ()
    zig: str = ""  # features to add, "+avx2+fma"
    zig_flags: tuple[str, ...] = ()


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_WIDE = "-mprefer-vector-width=512"
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", _WIDE)

# machine → its instruction sets, the plainest first. Every machine begins with "generic".
ISAS: Mapping[str, tuple[Isa, ...]] = {
    "x86_64": (
        Isa("generic", (), "x86-64"),
        Isa("avx2", _AVX2, "x86-64", _AVX2_FLAGS, "+avx2+fma+f16c"),
        Isa(
            "avx512",
            (*_AVX2, *_AVX512, "avx512_vnni"),
            "x86-64",
            (*_AVX2_FLAGS, *_AVX512_FLAGS),
            "+avx2+fma+f16c+avx512f+avx512bw+avx512dq+avx512vl+avx512vnni",
            (_WIDE,),
        ),
    ),
    "aarch64": (
        Isa("generic", (), "armv8-a"),
        Isa("neon", ("asimd",), "armv8-a"),
        Isa("dotprod", ("asimd", "asimddp"), "armv8.2-a+dotprod", (), "+v8_2a+dotprod"),
        Isa(
            "i8mm",
            ("asimd", "asimddp", "i8mm"),
            "armv8.2-a+dotprod+i8mm",
            (),
            "+v8_2a+dotprod+i8mm",
        ),
    ),
}
MACHINES = tuple(ISAS)
_SAME_MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}


class UnknownIsa(ValueError):
    """A machine that kernels are not built for, or the name of none of its instruction sets."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The instruction set that will run. `missing` are features it needs and the CPU lacks: then
    it was forced, and its first instruction of that kind ends the process by SIGILL."""

    isa: Isa
    reason: str
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.isa.name


def machine_name(machine: str | None = None) -> str:
    """`machine` (of this computer by default) by the name it has in ISAS, else as it is."""
    name = machine or platform.machine()
    return _SAME_MACHINE.get(name.lower(), name)


def isas_of(machine: str | None = None) -> tuple[Isa, ...]:
    """The instruction sets of a machine, the plainest first. Raises UnknownIsa."""
    name = machine_name(machine)
    if name not in ISAS:
        raise UnknownIsa(
            f"no native kernels for machine {name!r}; expected {' or '.join(MACHINES)}; "
            "use the numpy unit there (unit: packed)"
        )
    return ISAS[name]


def choose(
    features: Collection[str], override: str | None = None, machine: str | None = None
) -> Choice:
    """The best instruction set that `features` (common to all allowed cores) allow.

    `override` names one instead, and is obeyed even where the CPU lacks it. Raises UnknownIsa.

    >>> choose({"avx2", "fma", "f16c", "sse4_2"}, machine="x86_64").name
    'avx2'
    >>> choose({"asimd"}, "dotprod", "aarch64").missing
    ('asimddp',)
    """
    table = isas_of(machine)
    if override:
        for isa in table:
            if isa.name == override:
                missing = tuple(name for name in isa.needs if name not in features)
                why = f"asked for by {OVERRIDE} or the options"
                if missing:
                    why += f", although the cores lack {', '.join(missing)}"
                return Choice(isa, why, missing)
        names = ", ".join(isa.name for isa in table)
        raise UnknownIsa(
            f"kernels {override!r} on {machine_name(machine)}; expected one of {names}; "
            f"set {OVERRIDE} to one of them or leave it out"
        )
    best, lacking = table[0], ""
    for isa in table:
        missing = tuple(name for name in isa.needs if name not in features)
        if not missing:
            best, lacking = isa, ""
        elif not lacking:
            lacking = f"; {isa.name} needs {', '.join(missing)} on every allowed core"
    return Choice(best, f"the best that all allowed cores support{lacking}")
