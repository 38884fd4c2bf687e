"""What a board's cores and accelerators do meanwhile, and what the process waits for.

Sources: proc(5) (/proc/stat), getrusage(2); of the Linux tree Documentation/ABI/testing/
sysfs-class-devfreq and the drivers that show a load: devfreq (Rockchip, Mali), amdgpu, Tegra,
Adreno (kgsl), rknpu.
"""

from __future__ import annotations

import dataclasses
import re
import resource
import time
from collections.abc import Mapping
from pathlib import Path

Cores = Mapping[int, tuple[int, int]]  # core → (busy, all) in ticks since it started
_ACCELERATOR = re.compile(r"gpu|npu|mali|apu|tpu|dsp|vpu|nna|neural", re.I)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclasses.dataclass(frozen=True)
class Usage:
    """What this process has used so far, or between two looks."""

    wall_s: float
    cpu_s: float  # of all its threads
    minor_faults: int
    major_faults: int  # those that waited for storage
    voluntary_switches: int  # it waited
    involuntary_switches: int  # somebody else was given the core

    def since(self, earlier: Usage) -> Usage:
        return Usage(
            *(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(earlier)))
        )

    def plus(self, other: Usage) -> Usage:
        return Usage(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other)))
        )


NOTHING = Usage(0.0, 0.0, 0, 0, 0, 0)


def usage() -> Usage:
    """Now, of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        time.monotonic(),
        used.ru_utime + used.ru_stime,
        used.ru_minflt,
        used.ru_majflt,
        used.ru_nvcsw,
        used.ru_nivcsw,
    )


def cores(root: Path = Path("/")) -> Cores:
    """Every core's ticks; {} where the kernel does not tell."""
    return parse_stat(_read(root / "proc/stat"))


def parse_stat(text: str) -> Cores:
    """From /proc/stat. Time of guests is in that of users already; waiting for storage is idle."""
    found = {}
    for match in re.finditer(r"(?m)^cpu(\d+) ([\d ]+)$", text):
        ticks = [int(word) for word in match[2].split()][:8]
        if len(ticks) >= 4:
            idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
            found[int(match[1])] = (sum(ticks) - idle, sum(ticks))
    return found


def busy_shares(before: Cores, after: Cores) -> dict[int, float]:
    """Core → share of the time between two looks in which it was busy, 0 to 1."""
    shares = {}
    for core, (busy, total) in after.items():
        first = before.get(core)
        if first is not None and total > first[1]:
            shares[core] = min(1.0, max(0.0, (busy - first[0]) / (total - first[1])))
    return shares


def accelerators(root: Path = Path("/")) -> dict[str, float]:
    """Accelerator → share of the last moment in which it was busy, 0 to 1; {} where none tells."""
    found: dict[str, float] = {}
    for path in sorted((root / "sys/class/devfreq").glob("*/load")):
        match = re.match(r"(\d+)@\d+Hz", _read(path))
        if match and _ACCELERATOR.search(path.parent.name):
            found[path.parent.name] = int(match[1]) / 100
    for path in sorted((root / "sys/class/drm").glob("card*/device/gpu_busy_percent")):
        text = _read(path).strip()
        if text.isdigit():
            found[path.parent.parent.name] = int(text) / 100
    for pattern in ("devices/gpu.*/load", "devices/platform/gpu*/load"):
        for path in sorted((root / "sys").glob(pattern)):
            text = _read(path).strip()
            if text.isdigit():  # Tegra counts in tenths of a per cent
                found[path.parent.name] = int(text) / 1000
    for path in sorted((root / "sys/class/kgsl").glob("*/gpu_busy_percentage")):
        match = _PERCENT.match(_read(path))
        if match:
            found[path.parent.name] = float(match[1]) / 100
    shares = _PERCENT.findall(_read(root / "sys/kernel/debug/rknpu/load"))
    if shares:  # one a core; readable by root only
        found["rknpu"] = max(float(share) for share in shares) / 100
    return {name: min(1.0, share) for name, share in found.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
