"""What a board is: the records, and what follows from them. Read from a board by `parse.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from harness.verdicts import Record

OLDEST_PYTHON = (3, 9)
# numpy wheels exist for these tags; PEP 600 (manylinux_x_y) and its earlier names, PEP 656 (musl).
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}  # minor of glibc 2; other machines begin at 2.17


class CpuFacts(Record):
    """One core. `capacity` is the kernel's, 1024 for the strongest; both None where not told."""

    number: int
    allowed: bool = True  # may the engine run here (affinity, cgroup)
    part: str = ""  # "cortex-a76", or the model name of an x86
    max_mhz: int | None = None
    capacity: int | None = None
    governor: str = ""
    features: tuple[str, ...] = ()


class PythonFacts(Record):
    """The Python that the engine will run with. `platform_tags` are those of wheels, best first."""

    path: str
    version: str
    abi: str  # "cp311"
    platform_tags: tuple[str, ...]

    @property
    def version_pair(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


class FolderFacts(Record):
    """A candidate for the work folder. `reason` is why it is no good."""

    path: str
    free_mb: int | None = None
    writable: bool = False
    executable: bool = False
    reason: str = ""

    @property
    def usable(self) -> bool:
        return self.writable and self.executable


class ThermalZone(Record):
    name: str  # "thermal_zone0"
    kind: str = ""  # "cpu-thermal"
    celsius: float | None = None


class Facts(Record):
    """One look at a board. Empty text and None mean that the board did not tell."""

    machine: str  # of the userland: "armv7l" for a 32-bit one on a 64-bit kernel
    kernel: str  # "Linux 6.1.75"
    os: str = ""
    model: str = ""
    serial: str = ""
    libc: str = ""  # "glibc 2.36", "musl 1.2.4", "bionic"
    bits: int | None = None  # of the userland
    cpus: tuple[CpuFacts, ...] = ()
    features: tuple[str, ...] = ()  # common to all allowed cores
    memory_mb: int | None = None  # MiB: what this user may have of what the board has
    available_mb: int | None = None
    memory_limit: str = ""  # what lowers memory_mb below the board's own: "cgroup", "ulimit -d"
    folders: tuple[FolderFacts, ...] = ()
    python: PythonFacts | None = None
    python_refused: tuple[str, ...] = ()  # "PATH: reason" of each candidate tried in vain
    boot_id: str = ""
    clock_s: float | None = None  # the board's wall clock, seconds since 1970
    clock_offset_s: float | None = None  # board minus host; never used for arithmetic
    tools: tuple[str, ...] = ()
    thermal_zones: tuple[ThermalZone, ...] = ()
    governor: str = ""  # of all allowed cores; "performance, schedutil" when they differ
    noise: bool = False  # the shell's start files print something

    @property
    def allowed_cpus(self) -> tuple[CpuFacts, ...]:
        return tuple(cpu for cpu in self.cpus if cpu.allowed)

    @property
    def big_cores(self) -> tuple[int, ...]:
        """The strongest of the allowed cores by capacity, else by clock; all when told neither.

        Cores within a tenth of the best count as big: boards bin cores of one kind by clock.
        """
        cores = self.allowed_cpus
        for strength in (
            {cpu.number: cpu.capacity for cpu in cores},
            {cpu.number: cpu.max_mhz for cpu in cores},
        ):
            known = {number: value for number, value in strength.items() if value is not None}
            if known and len(known) == len(cores):
                best = max(known.values())
                return tuple(number for number, value in known.items() if value >= 0.9 * best)
        return tuple(cpu.number for cpu in cores)

    @property
    def usable_folders(self) -> tuple[FolderFacts, ...]:
        return tuple(folder for folder in self.folders if folder.usable)

    def why_no_folder(self) -> str:
        """A sentence with the reason of each candidate."""
        reasons = (f"{folder.path}: {folder.reason}" for folder in self.folders if folder.reason)
        return "; ".join(reasons) or "no candidate folder was tried"

    def why_no_python(self) -> str:
        return "; ".join(self.python_refused) or "no python3 on the board's PATH"


def memory_facts(told: Mapping[str, object]) -> Facts:
    """Of stored facts, whatever version wrote them, what they say about memory."""

    def number(name: str) -> int | None:
        value = told.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            return None
        return int(value)

    limit = told.get("memory_limit")
    return Facts(
        machine="",
        kernel="",
        memory_mb=number("memory_mb"),
        available_mb=number("available_mb"),
        memory_limit=limit if isinstance(limit, str) else "",
    )


def common_features(cpus: Iterable[CpuFacts]) -> tuple[str, ...]:
    """Features that every one of `cpus` has, in the order of the first."""
    sets = [cpu.features for cpu in cpus]
    if not sets:
        return ()
    shared = set(sets[0]).intersection(*map(set, sets[1:]))
    return tuple(feature for feature in sets[0] if feature in shared)


def platform_tags(machine: str, libc: str) -> tuple[str, ...]:
    """Tags of wheels that run on `machine` with `libc`, best first; () for one without wheels.

    >>> platform_tags("aarch64", "glibc 2.19")
    ('manylinux_2_19_aarch64', 'manylinux_2_18_aarch64', 'manylinux_2_17_aarch64', \
'manylinux2014_aarch64')
    """
    name, _, version = libc.partition(" ")
    found = re.match(r"([0-9])\.([0-9]{1,3})(?![0-9])", version)
    if found is None:
        return ()
    major, minor = int(found[1]), int(found[2])
    if minor > 200:  # hostile or garbled; the list grows with the number
        return ()
    if name == "musl":
        return tuple(f"musllinux_{major}_{step}_{machine}" for step in range(minor, -1, -1))
    if name != "glibc" or major != 2:
        return ()
    tags = []
    for step in range(minor, _OLDEST_GLIBC.get(machine, 17) - 1, -1):
        tags.append(f"manylinux_2_{step}_{machine}")
        if step in _OLD_NAMES and (step == 17 or machine in _OLDEST_GLIBC):
            tags.append(f"{_OLD_NAMES[step]}_{machine}")
    return tuple(tags)
