"""One look at a process and its board: memory, faults, time on the CPU, temperature, clocks.

All fields are optional: a board says what it can, and what it cannot is None. MB are 2^20 bytes.
Sources: proc(5), and of the Linux tree Documentation/admin-guide/pm/cpufreq.rst,
Documentation/accounting/psi.rst, Documentation/driver-api/thermal/sysfs-api.rst.
"""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import psutil

MB = float(1 << 20)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample. Counters (`faults`, `switches`, `cpu_seconds`) count since the process began."""

    rss_mb: float | None = None  # resident, mapped package pages included
    pss_mb: float | None = None  # resident, shared pages divided among their users
    anonymous_mb: float | None = None  # resident and no file's: heap, stacks, buffers
    swap_mb: float | None = None
    minor_faults: int | None = None
    major_faults: int | None = None  # those that waited for storage
    cpu_seconds: float | None = None
    cpu_percent: float | None = None  # 100 = one core busy since the sample before
    threads: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    temperatures: dict[str, float] = dataclasses.field(default_factory=dict)  # zone → °C
    clocks_mhz: list[float] = dataclasses.field(default_factory=list)  # per core
    mem_available_mb: float | None = None
    psi_memory: float | None = None  # % of the last 10 s in which some task waited for memory

    def to_data(self) -> dict[str, Any]:
        """As JSON, without the fields that are unknown."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and value not in ({}, [])
        }


class Sampler:
    """Samples one process again and again; `cpu_percent` is over the time between two samples."""

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self.pid, self._root = pid, root
        self._last: tuple[float, float] | None = None  # (monotonic s, CPU s)
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.Error:
            self._process = None

    def sample(self) -> Sample:
        """What can be seen now; a process that has ended leaves only the board's own fields."""
        return Sample(
            **self._of_process(),
            temperatures=temperatures(self._root),
            clocks_mhz=clocks_mhz(self._root),
            mem_available_mb=_available_mb(),
            psi_memory=parse_pressure(_read(self._root / "proc/pressure/memory")),
        )

    def _of_process(self) -> dict[str, Any]:
        if self._process is None:
            return {}
        try:
            with self._process.oneshot():
                memory = self._process.memory_info()
                times = self._process.cpu_times()
                switches = self._process.num_ctx_switches()
                threads = self._process.num_threads()
        except (psutil.Error, OSError):
            return {}
        if not memory.rss:  # on its way out: the kernel has taken its memory, but not its number
            return {}
        now, busy = time.monotonic(), times.user + times.system
        percent = None
        if self._last is not None and now > self._last[0]:
            percent = round(100.0 * (busy - self._last[1]) / (now - self._last[0]), 1)
        self._last = (now, busy)
        proc = self._root / "proc" / str(self.pid)
        minor, major = parse_faults(_read(proc / "stat"))
        rollup = parse_kilobytes(_read(proc / "smaps_rollup"))
        return {
            "rss_mb": round(memory.rss / MB, 3),
            "pss_mb": _mb(rollup.get("Pss")),
            "anonymous_mb": _mb(rollup.get("Anonymous")),
            "swap_mb": _mb(rollup.get("Swap")),
            "minor_faults": minor,
            "major_faults": major,
            "cpu_seconds": round(busy, 2),
            "cpu_percent": percent,
            "threads": threads,
            "voluntary_switches": switches.voluntary,
            "involuntary_switches": switches.involuntary,
        }


def sample(pid: int) -> Sample:
    """One sample of process `pid`, without `cpu_percent`, which needs two."""
    return Sampler(pid).sample()


def parse_faults(text: str) -> tuple[int | None, int | None]:
    """(minor, major) page faults from /proc/PID/stat; the command name may hold anything."""
    fields = text.rpartition(")")[2].split()
    try:
        return int(fields[7]), int(fields[9])
    except (IndexError, ValueError):
        return None, None


def parse_kilobytes(text: str) -> dict[str, int]:
    """`Name:   123 kB` lines, as in smaps_rollup and meminfo, to kilobytes by name."""
    return {match[1]: int(match[2]) for match in re.finditer(r"^(\w+):\s+(\d+) kB\s*$", text, re.M)}


def parse_pressure(text: str) -> float | None:
    """`some avg10` of a PSI file, in per cent."""
    match = re.search(r"^some avg10=(\d+(?:\.\d+)?)", text, re.M)
    return float(match[1]) if match else None


def temperatures(root: Path = Path("/")) -> dict[str, float]:
    """°C by thermal zone (`type`, numbered when two zones share one)."""
    found: dict[str, float] = {}
    zones = (root / "sys/class/thermal").glob("thermal_zone*")
    for zone in sorted(zones, key=lambda path: _number(path.name)):
        try:
            degrees = int(_read(zone / "temp")) / 1000.0
        except ValueError:  # a zone whose sensor is off gives nothing, or an error
            continue
        name = _read(zone / "type").strip() or zone.name
        found[name if name not in found else f"{name}#{_number(zone.name)}"] = degrees
    return found


def clocks_mhz(root: Path = Path("/")) -> list[float]:
    """The clock of each core in MHz, in the order of their numbers; [] where none is told."""
    clocks = []
    cpus = (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
    for cpu in sorted(cpus, key=lambda path: _number(path.name)):
        text = _read(cpu / "cpufreq/scaling_cur_freq")
        if text.strip().isdigit():
            clocks.append(int(text) / 1000.0)
    if clocks:
        return clocks
    cpuinfo = _read(root / "proc/cpuinfo")  # x86 without a cpufreq driver, as in virtual machines
    return [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.M)]


def _available_mb() -> float | None:
    try:
        return round(psutil.virtual_memory().available / MB, 1)
    except (psutil.Error, OSError):
        return None


def _mb(kilobytes: int | None) -> float | None:
    return None if kilobytes is None else round(kilobytes / 1024.0, 3)


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
