"""What a measurement must say about the machine, and who else used its processors meanwhile."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SYS = Path("/sys/devices/system/cpu")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BUSY_SHARE = 0.03  # of the allowed time taken by others: more is worth a note


def threads_allowed() -> int:
    return len(os.sched_getaffinity(0))


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0, 0 where the kernel does not say."""
    sizes = [0]
    for path in SYS.glob("cpu0/cache/index*/size"):
        text = _read(path)
        if text[:-1].isdigit():
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes)


def description(root: Path) -> dict[str, Any]:
    """Facts that a ratio depends on. `root` is the checkout, for the revision."""
    cpuinfo = _fields(Path("/proc/cpuinfo"))
    return {
        "processor": cpuinfo.get("model name") or cpuinfo.get("Model") or platform.machine(),
        "processors allowed": threads_allowed(),
        "clock now (MHz)": cpuinfo.get("cpu MHz", "not told"),
        "governor": _read(SYS / "cpu0/cpufreq/scaling_governor") or "not told (virtual machine?)",
        "last-level cache (MiB)": last_level_cache() >> 20,
        "memory (MiB)": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "transparent huge pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "revision": _revision(root),
    }


@dataclasses.dataclass(frozen=True)
class Usage:
    """Seconds of processor time so far: of the whole machine, stolen from it, and of `pids`."""

    wall_s: float
    busy_s: float
    stolen_s: float
    own_s: float


def usage(pids: Sequence[int]) -> Usage:
    # user nice system idle iowait irq softirq steal, of all processors together
    ticks = [int(field) for field in _read(Path("/proc/stat")).splitlines()[0].split()[1:9]]
    busy = sum(ticks) - ticks[3] - ticks[4] - ticks[7]
    own = sum(_ticks_of(pid) for pid in (*pids, os.getpid()))
    return Usage(sum(ticks) * TICK_S, busy * TICK_S, ticks[7] * TICK_S, own * TICK_S)


def taken(before: Usage, after: Usage) -> dict[str, float]:
    """The shares of processor time that others had: other processes here, other machines."""
    wall = max(after.wall_s - before.wall_s, TICK_S)
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return {
        "others": max(0.0, others / wall),
        "stolen": (after.stolen_s - before.stolen_s) / wall,
    }


def disturbance(shares: dict[str, float]) -> list[str]:
    """Notes for a row, empty on a quiet machine."""
    names = {"others": "other processes had", "stolen": "the hypervisor took"}
    return [
        f"not quiet: {names[name]} {share:.0%} of the processors"
        for name, share in shares.items()
        if share > BUSY_SHARE
    ]


def _ticks_of(pid: int) -> int:
    # The name, in parentheses, may hold blanks: fields count from behind it.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _fields(path: Path) -> dict[str, str]:
    """The first block of `key : value` lines."""
    found: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, separator, value = line.partition(":")
        if separator:
            found.setdefault(key.strip(), value.strip())
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _revision(root: Path) -> str:
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    revision = git("rev-parse", "--short", "HEAD")
    if not revision:
        return "not told"
    return f"{revision} and changes" if git("status", "--porcelain") else revision
