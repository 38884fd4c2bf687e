"""What the cores of this computer can do, and what all that we may run on have in common.

Boards mix cores, and Linux may move a thread to any that it is allowed on: an instruction counts
only when every allowed core has it. /proc/cpuinfo tells it per core. On arm64 the kernel also
hands every process the features of the system in its auxiliary vector (getauxval(3), AT_HWCAP);
that is believed over a /proc/cpuinfo that is missing or speaks of another machine, which happens
under an emulator.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from engine.native.isa import machine_name

CPUINFO = Path("/proc/cpuinfo")
AT_HWCAP, AT_HWCAP2 = 16, 26  # include/uapi/linux/auxvec.h
# arch/arm64/include/uapi/asm/hwcap.h, by the names that /proc/cpuinfo prints; those in use here
# and a few that help to tell cores apart.
HWCAP: Mapping[str, int] = {
    "fp": 0,
    "asimd": 1,
    "aes": 3,
    "crc32": 7,
    "atomics": 8,
    "fphp": 9,
    "asimdhp": 10,
    "asimddp": 20,
    "sve": 22,
}
HWCAP2: Mapping[str, int] = {"sve2": 1, "i8mm": 13, "bf16": 14}


@dataclasses.dataclass(frozen=True)
class CpuFeatures:
    """`common` to all allowed cores, sorted. `partial`: feature → allowed cores that have it, for
    those that others lack. `source` is where it was read."""

    common: tuple[str, ...]
    partial: Mapping[str, tuple[int, ...]]
    source: str

    def __contains__(self, feature: str) -> bool:
        return feature in self.common

    def explain(self, missing: Iterable[str]) -> str:
        """Which cores have what `missing` names, "i8mm on cores 4, 5 alone"; "" for none."""
        parts = []
        for name in missing:
            if name in self.partial:
                parts.append(f"{name} on cores {', '.join(map(str, self.partial[name]))} alone")
        return "; ".join(parts)


def parse_cpuinfo(text: str) -> dict[int, frozenset[str]]:
    """{core: features} of a /proc/cpuinfo of x86 or ARM; {} when it names no core.

    Old ARM kernels tell the features once, for all cores, behind or before them.
    """
    cores: dict[int, frozenset[str] | None] = {}
    shared: frozenset[str] = frozenset()
    current = None
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        name = name.strip()
        if not line.strip():
            current = None
        elif not colon:
            continue
        elif name == "processor" and value.strip().isdigit():
            current = int(value)
            cores.setdefault(current, None)
        elif name in ("flags", "Features"):
            found = frozenset(value.split())
            if current is None:
                shared = found
            else:
                cores[current] = found
    if not shared:  # told within one core's block for all of them
        told = [found for found in cores.values() if found is not None]
        if len(told) == 1:
            shared = told[0]
    return {core: shared if found is None else found for core, found in cores.items()}


def features_of(
    cores: Mapping[int, frozenset[str]],
    allowed: Collection[int],
    hwcap: frozenset[str] | None = None,
) -> CpuFeatures:
    """What all `allowed` cores have. `hwcap`: the auxiliary vector's features, None without one.

    An allowed core that /proc/cpuinfo does not list is offline and does not count. Without any
    listed one, or where the list is of another machine (an emulator shows its host's, which may
    share a name like aes; every arm64 core has asimd), the vector alone is believed.
    """
    listed = {core: cores[core] for core in allowed if core in cores}
    if hwcap is not None:
        known = frozenset(HWCAP) | frozenset(HWCAP2)
        telling = hwcap & {"asimd"} or hwcap
        if not listed or not all(found & telling for found in listed.values()):
            return CpuFeatures(tuple(sorted(hwcap)), {}, "auxiliary vector")
        listed = {core: found - (known - hwcap) for core, found in listed.items()}
    if not listed:
        return CpuFeatures((), {}, "nothing: no features are known")
    common = frozenset.intersection(*listed.values())
    partial = {
        name: tuple(sorted(core for core, found in listed.items() if name in found))
        for name in sorted(frozenset.union(*listed.values()) - common)
    }
    source = "/proc/cpuinfo" + (" and auxiliary vector" if hwcap is not None else "")
    return CpuFeatures(tuple(sorted(common)), partial, source)


def hwcap_features(hwcap: int, hwcap2: int) -> frozenset[str]:
    """The names of the bits of arm64's AT_HWCAP and AT_HWCAP2.

    >>> sorted(hwcap_features(0b11, 1 << 13))
    ['asimd', 'fp', 'i8mm']
    """
    first = {name for name, bit in HWCAP.items() if hwcap >> bit & 1}
    return frozenset(first | {name for name, bit in HWCAP2.items() if hwcap2 >> bit & 1})


def auxiliary_vector() -> frozenset[str] | None:
    """The features that this process was told at its start; None where no C library says so."""
    try:
        library = ctypes.CDLL(None)
        getauxval = library.getauxval
    except (OSError, AttributeError):
        return None
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return hwcap_features(getauxval(AT_HWCAP), getauxval(AT_HWCAP2))


def detect(cpuinfo: Path = CPUINFO) -> CpuFeatures:
    """The features common to the cores that this process may run on."""
    try:
        cores = parse_cpuinfo(cpuinfo.read_text(errors="replace"))
    except OSError:
        cores = {}
    hwcap = auxiliary_vector() if machine_name() == "aarch64" else None
    return features_of(cores, os.sched_getaffinity(0), hwcap)
