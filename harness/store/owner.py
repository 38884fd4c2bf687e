"""Which process holds something, told so that its death can be proved.

An owner is the text `user@host:pid:start`. `start` is `place.boot.ticks`: the place is a hash of
the machine and its process namespace, the boot the kernel's boot_id, the ticks the process's start
since that boot. A process number alone is reused; wall-clock start times move when NTP steps the
clock, so they would make a living process look dead.
"""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import os
import re
import socket
from pathlib import Path

import psutil

_TEXT = re.compile(
    r"(?P<user>.*)@(?P<host>[^@:]+):(?P<pid>\d+):"
    r"(?P<place>[0-9a-f]+)\.(?P<boot>[0-9a-f]+)\.(?P<ticks>\d+)"
)


# A process that lives, but that this user may not look at (/proc mounted with hidepid).
_UNREADABLE = -1


@dataclasses.dataclass(frozen=True)
class Owner:
    user: str
    host: str
    pid: int
    place: str
    boot: str
    ticks: int

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.pid}:{self.place}.{self.boot}.{self.ticks}"

    @staticmethod
    def parse(text: str) -> Owner | None:
        """None for a text that is no owner of ours, such as a person's name."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        user, host, pid, place, boot, ticks = match.groups()
        return Owner(user, host, int(pid), place, boot, int(ticks))


def current_owner() -> str:
    """This process, as an owner."""
    pid = os.getpid()
    ticks = _start_ticks(pid)
    if (
        ticks is None or ticks == _UNREADABLE
    ):  # cannot happen to a living process that may read about itself
        raise RuntimeError(f"process {pid} finds no start time of itself")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in passwd
        user = str(os.getuid())
    host = socket.gethostname().replace("@", "_").replace(":", "_") or "localhost"
    return str(Owner(user, host, pid, _place(), boot_identity(), ticks))


def is_dead(text: str) -> bool:
    """True only if the owner is proved dead: a process of this machine that is gone.

    An owner on another machine, in another process namespace, or in no format of ours is never
    proved dead; its lease ends by its TTL.
    """
    owner = Owner.parse(text)
    if owner is None or owner.place != _place():
        return False
    if owner.boot != boot_identity():
        return True  # this machine has booted since
    ticks = _start_ticks(owner.pid)
    return ticks is None or ticks not in (owner.ticks, _UNREADABLE)


def boot_identity() -> str:
    """Changes with each boot of this machine; 12 hexadecimal digits."""
    try:
        raw = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        raw = str(int(psutil.boot_time()))
    return hashlib.sha256(raw.encode()).hexdigest()[:12]


def _place() -> str:
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{machine}|{socket.gethostname()}|{namespace}".encode()).hexdigest()[:8]


def _start_ticks(pid: int) -> int | None:
    """When a process started, in kernel ticks since the boot; None if it is gone or a zombie."""
    if Path("/proc/self/stat").exists():
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return _UNREADABLE if psutil.pid_exists(pid) else None
        # The command name is in parentheses and may hold anything, so split behind the last one.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return int(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return _UNREADABLE
