"""What is left of an engine that ended badly: gathered by the supervisor, judged on the host.

Before the end it looks at the process now and then, since a killed one cannot be asked any more.
Afterwards it reads what the kernel and the services of the board said since the run began. Kernel
lines are rate-limited, and often not readable: that nothing was found proves nothing.

Sources: proc(5), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst,
Documentation/ABI/testing/dev-kmsg, Documentation/admin-guide/ramoops.rst of Linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import crashing

LOOK_S = 10.0  # between two looks at the process's memory map, which the kernel has to walk
DEAR_S = 0.02  # a look that takes longer is taken six times as rarely
LINES, LINE_CHARS = 300, 400  # of the kernel's and the journal's lines, the newest
ASK_S = 4.0  # for one command of the board
MAPPINGS = 8  # of the process's, the largest
FILES = 32  # of pstore
PIDFD_INIT = 0xEFFFFFFC  # inode of the first pid namespace: include/linux/proc_ns.h

_STATUS = (
    *("VmPeak", "VmSize", "VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmSwap", "VmLck"),
    "Threads",
)
_ROLLUP = ("Rss", "Pss", "Private_Clean", "Private_Dirty", "Anonymous", "Swap", "Locked")
_MEMINFO = (
    *("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "SwapTotal", "SwapFree"),
    *("AnonPages", "Mapped", "Shmem", "Slab", "Committed_AS", "CommitLimit", "CmaFree"),
)
_VMSTAT = ("oom_kill", "pgmajfault", "pswpin", "pswpout", "allocstall_normal", "compact_fail")
_CGROUP: Sequence[str] = (
    "memory.max",
    "memory.high",
    "memory.current",
    "memory.peak",
    "memory.swap.max",
)
_CGROUP_V1: Sequence[str] = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt")
_LIMITS = ("Max address space", "Max data size", "Max locked memory", "Max core file size")


class Evidence:
    """Of one run. `look` is called with every sample, `collect` after an end that was not asked
    for. Neither raises for what a board does not have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kernel = KernelLog()
        self._began_s = time.monotonic()
        self._pid = 0
        self._process: dict[str, Any] = {}
        self._place: tuple[Path, bool] | None = None
        self._cgroup_before: dict[str, Any] = {}
        self._next, self._period = 0.0, LOOK_S
        self._pstore = pstore()

    def begin(self, pid: int) -> None:
        """Another engine process of this run was started."""
        self._pid, self._process = pid, {}
        self._next, self._period = 0.0, LOOK_S
        self._place = cgroup_of(pid)
        self._cgroup_before = cgroup(self._place)

    def look(self) -> None:
        """The process as it is now, in place of what was seen before."""
        now = time.monotonic()
        proc = Path(f"/proc/{self._pid}")
        status = fields(_read(proc / "status"), _STATUS)
        if not status:  # it has ended
            return
        place = cgroup_of(self._pid)
        if place is not None and place != self._place:  # somebody moved it
            self._place, self._cgroup_before = place, cgroup(place)
        found: dict[str, Any] = {"seen_s": round(now - self._began_s, 3), "status": status}
        for name in ("oom_score_adj", "oom_score"):
            text = _read(proc / name).strip()
            if text:
                found[name] = text[:20]
        if now >= self._next:
            found["smaps_rollup"] = fields(_read(proc / "smaps_rollup"), _ROLLUP)
            found["maps"] = largest(_read(proc / "maps").splitlines())
            found["limits"] = limits(_read(proc / "limits"))
            took = time.monotonic() - now
            self._period = 6 * LOOK_S if took > DEAR_S else LOOK_S
            self._next = now + self._period
        self._process = {**self._process, **found}

    def collect(self, attempt: int) -> dict[str, Any]:
        """Everything about the engine process that has just ended; plain JSON."""
        try:
            inode = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:
            inode = PIDFD_INIT
        return {
            "attempt": attempt,
            "pid": self._pid,
            "own_pid_namespace": inode != PIDFD_INIT,
            "process": self._process,
            "cgroup": {"before": self._cgroup_before, "after": cgroup(self._place)},
            "meminfo": fields(_read(Path("/proc/meminfo")), _MEMINFO),
            "vmstat": fields(_read(Path("/proc/vmstat")), _VMSTAT),
            "pressure": _read(Path("/proc/pressure/memory")).splitlines()[:2],
            "pstore": pstore(),
            "pstore_before": self._pstore,
            "kernel": self._kernel.since(),
            "journal": journal(self._began_s),
            "record": self._record(attempt),
        }

    def _record(self, attempt: int) -> str:
        """What the process wrote of itself as it died; "" when it wrote nothing."""
        path = self.folder / crashing.record_name(attempt)
        try:
            with path.open("rb") as file:
                return file.read(crashing.MOST_BYTES).decode("ascii", errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        self._kernel.close()


class KernelLog:
    """The kernel's lines from now on: /dev/kmsg from its end where this user may read it, else
    what dmesg prints with a time after now."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._why = ""
        self._fd: int | None = None
        try:
            fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._fd = fd
            os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            self.close()
            self._why = f"/dev/kmsg: {error.strerror}"

    def since(self) -> dict[str, Any]:
        """{"source", "lines", "left_out", "why"}: `why` says what could not be read."""
        if self._fd is not None:
            return _told("kmsg", list(self._kmsg()), self._why)
        status, text = ask(["dmesg"])
        if status == 0:
            return _told("dmesg", list(_after(text.splitlines(), self._began_s)), self._why)
        why = text.strip().splitlines()[-1:] or ["not there"]
        return _told("", [], f"{self._why}; dmesg: {why[0][:200]}")

    def _kmsg(self) -> Iterable[str]:
        assert self._fd is not None
        for _ in range(100_000):
            try:
                record = os.read(self._fd, 8192)
            except BrokenPipeError:  # lines were overwritten before they were read
                continue
            except OSError:  # no more of them
                return
            head, _, message = record.decode(errors="replace").partition(";")
            parts = head.split(",")
            stamp = int(parts[2]) / 1e6 if len(parts) > 2 and parts[2].isdigit() else 0.0
            yield f"[{stamp:12.6f}] {message.splitlines()[0] if message else ''}"

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def journal(began_s: float) -> dict[str, Any]:
    """Lines of systemd's journal, or of Android's log, since `began_s` (CLOCK_MONOTONIC)."""
    lines: list[str] = []
    source, why = "", "neither journalctl nor logcat is there"
    if shutil.which("journalctl"):
        source = "journalctl"
        command = ["journalctl", "-b", "-q", "--no-pager", "-o", "short-monotonic", "-n", "400"]
        status, text = ask(command)
        lines, why = list(_after(text.splitlines(), began_s)), ""
        if status != 0:
            lines, why = [], f"journalctl: {text.strip()[-200:]}"
    elif shutil.which("logcat"):
        source = "logcat"
        status, text = ask(["logcat", "-d", "-b", "kernel,system,events", "-t", str(LINES)])
        lines, why = (text.splitlines(), "") if status == 0 else ([], f"logcat: {text[-200:]}")
    return _told(source, lines, why)


def ask(command: Sequence[str]) -> tuple[int, str]:
    """(status, output with its errors) of a command of the board; (-1, why) when there is none."""
    path = shutil.which(command[0])
    if path is None:
        return -1, f"{command[0]} is not there"
    try:
        done = subprocess.run(
            [path, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return -1, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def _after(lines: Iterable[str], began_s: float) -> Iterable[str]:
    """Lines "[  123.456789] …" whose time is not before `began_s`, with a second of grace: the
    kernel's clock and CLOCK_MONOTONIC differ by what they count of early boot."""
    for line in lines:
        stamp = line.lstrip("[ ").split("]")[0].strip()
        try:
            if float(stamp) >= began_s - 1.0:
                yield line
        except ValueError:
            continue


def _told(source: str, lines: Sequence[str], why: str) -> dict[str, Any]:
    kept = deque((line[:LINE_CHARS] for line in lines), maxlen=LINES)
    return {
        "source": source,
        "lines": list(kept),
        "left_out": len(lines) - len(kept),
        "why": why[:400],
    }


def cgroup_of(pid: int) -> tuple[Path, bool] | None:
    """(folder, whether of version 2) of the memory cgroup that a process is in; None without."""
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            folder = Path("/sys/fs/cgroup") / path.strip("/")
            if (folder / "memory.events").exists():
                return folder, True
        elif "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.strip("/"), False
    return None


def cgroup(place: tuple[Path, bool] | None) -> dict[str, Any]:
    """Limits, use and kills of a memory cgroup; {} where there is none."""
    if place is None:
        return {}
    folder, second = place
    names = _CGROUP if second else _CGROUP_V1
    found = {name: _read(folder / name).strip()[:40] for name in names}
    told = fields(_read(folder / ("memory.events" if second else "memory.oom_control")))
    if not any(found.values()) and not told:
        return {}
    kept = {name: value for name, value in found.items() if value}
    return {"path": str(folder)[:300], "events": told, **kept}


def pstore() -> list[str]:
    """What an earlier kernel left of its own end, "name bytes"; [] where nothing is kept."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path("/sys/fs/pstore").iterdir())[:FILES]:
            with contextlib.suppress(OSError):
                found.append(f"{path.name[:120]} {path.stat().st_size}")
    return found


def fields(text: str, wanted: Sequence[str] = ()) -> dict[str, int]:
    """{name: number} of lines like "VmRSS:  1234 kB" or "oom_kill 2"; all, or the wanted ones."""
    found = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit() and (not wanted or words[0] in wanted):
            found[words[0][:60]] = int(words[1])
        if len(found) >= 64:
            break
    return found


def limits(text: str) -> dict[str, str]:
    """The soft limits of /proc/PID/limits that can end or hide a crash."""
    found = {}
    for line in text.splitlines():
        for name in _LIMITS:
            if line.startswith(name):
                found[name] = (line[len(name) :].split() or [""])[0][:20]
    return found


def largest(lines: Sequence[str]) -> dict[str, Any]:
    """Of the lines of a /proc/PID/maps: how many, and the largest."""
    sized = []
    for line in lines:
        start, _, rest = line.partition("-")
        with contextlib.suppress(ValueError):
            sized.append((int(rest.split(" ", 1)[0], 16) - int(start, 16), line))
    sized.sort(key=lambda item: -item[0])
    return {
        "count": len(lines),
        "largest": [f"{size >> 10} kB {line[:200]}" for size, line in sized[:MAPPINGS]],
    }


def lean(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is empty."""
    return {name: value for name, value in evidence.items() if value not in ("", [], {}, None)}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:  # it has ended, this user may not, or this kernel has it not
        return ""
