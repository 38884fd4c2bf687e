"""Processes of this machine, read from /proc: identity, parents, whole trees.

A pid alone names nobody, since pids are reused; with the start time in clock ticks since boot, and
the boot it belongs to, it names one process for good. Linux only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One process: parent, state letter (Z is a zombie), start time in ticks since boot."""

    pid: int
    parent: int
    state: str
    start: int


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def entry(pid: int) -> Entry | None:
    """The process `pid`, or None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself; fields after it are fixed
    # (proc(5): state is field 3, ppid 4, starttime 22).
    fields = text[text.rindex(b")") + 2 :].split()
    return Entry(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def start_of(pid: int) -> str | None:
    """`BOOT_ID/TICKS`: with the pid the identity of a living process; None for dead or zombie."""
    found = entry(pid)
    if found is None or found.state == "Z":
        return None
    return f"{boot_id()}/{found.start}"


def table() -> dict[int, Entry]:
    """Every process, by pid."""
    found = (entry(int(path.name)) for path in PROC.iterdir() if path.name.isdigit())
    return {item.pid: item for item in found if item is not None}


def descendants(pid: int) -> list[Entry]:
    """All processes below `pid`, zombies too; those that left by `setsid` still count."""
    processes = table()
    below: dict[int, list[Entry]] = {}
    for item in processes.values():
        below.setdefault(item.parent, []).append(item)
    tree, queue = [], [pid]
    while queue:
        for item in below.get(queue.pop(), ()):
            tree.append(item)
            queue.append(item.pid)
    return tree


def send(signum: int, entries: list[Entry]) -> None:
    """Signals those that are still the same process."""
    for item in entries:
        now = entry(item.pid)
        if now is not None and now.start == item.start:
            with contextlib.suppress(ProcessLookupError):
                os.kill(item.pid, signum)


def kill(entries: list[Entry], seconds: float = 5.0) -> list[int]:
    """SIGKILL to those that still live; returns pids that live on after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        living = [item for item in entries if start_of(item.pid) == f"{boot_id()}/{item.start}"]
        if not living or time.monotonic() > end:
            return [item.pid for item in living]
        send(signal.SIGKILL, living)
        time.sleep(0.01)


def kill_tree(pid: int, seconds: float = 5.0) -> list[int]:
    """SIGKILL to all below `pid`, repeated for those born meanwhile; returns pids that live on."""
    end = time.monotonic() + seconds
    while True:
        living = [item for item in descendants(pid) if item.state != "Z"]
        if not living or time.monotonic() > end:
            return [item.pid for item in living]
        send(signal.SIGKILL, living)
        time.sleep(0.01)
