"""Hardware counters of this process, by perf_event_open(2): cycles, instructions, cache misses.

A kernel may forbid them (kernel.perf_event_paranoid, a container's filter), and a virtual machine
may have none: then the reason is told in their place. Only what the process itself does in user
space is counted, which the kernel allows most readily. Counters that had to share the processor's
registers are scaled by the time that they ran.

On a board with two kinds of cores the generic events count on one kind in older kernels.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from pathlib import Path

# name → (type, config) of perf_event_attr
EVENTS = {
    "cycles": (0, 0),
    "instructions": (0, 1),
    "cache_references": (0, 2),
    "cache_misses": (0, 3),
    "llc_misses": (3, 2 | 1 << 16),  # last level | read << 8 | miss
}
# machine → number of the system call, with pointers of 8 and of 4 bytes
_SYSCALLS = {
    "x86_64": (298, 336),
    "i686": (298, 336),
    "aarch64": (241, 364),
    "armv7l": (241, 364),
    "armv6l": (241, 364),
    "riscv64": (241, 241),
    "ppc64le": (319, 319),
    "s390x": (331, 331),
}
_ENABLE, _DISABLE, _RESET = 0x2400, 0x2401, 0x2403  # ioctls
_DISABLED, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1, 1 << 5, 1 << 6
_TIMES = 1 | 2  # read_format: the times enabled and running
_WORDS = {
    errno.EACCES: "the kernel forbids it",
    errno.EPERM: "the kernel or a container's filter forbids it",
    errno.ENOENT: "this processor does not count it",
    errno.ENODEV: "this processor has no counters",
    errno.EOPNOTSUPP: "this processor has no counters",
    errno.ENOSYS: "the kernel was built without counters",
    errno.EMFILE: "too many open files",
}


class _Attributes(ctypes.Structure):
    """struct perf_event_attr, version 0."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("config", "sample_period", "sample_type")),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1", ctypes.c_uint64),
    ]


class Counters:
    """Counts all threads that the process has when this is made. `missing` says of each event that
    is not counted why. Close it when done."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self._files: dict[str, list[int]] = {}
        number = _number_of_call()
        if number is None:
            words = f"no counters known for {platform.machine() or 'this machine'}"
            self.missing = dict.fromkeys(EVENTS, words)
            return
        threads = sorted(int(entry.name) for entry in Path("/proc/self/task").iterdir())
        for name, (kind, config) in EVENTS.items():
            files = self._files[name] = []
            try:
                for thread in threads:
                    files.append(_open(number, kind, config, thread))
            except OSError as error:
                self._drop(name, _reason(error))

    def start(self) -> None:
        """Count from here on, from 0."""
        for file in self._all():
            fcntl.ioctl(file, _RESET, 0)
            fcntl.ioctl(file, _ENABLE, 0)

    def stop(self) -> dict[str, float]:
        """No longer; what was counted since `start`, of all threads together."""
        for file in self._all():
            fcntl.ioctl(file, _DISABLE, 0)
        found = {}
        for name in list(self._files):
            values = [_read(file) for file in self._files[name]]
            known = [value for value in values if value is not None]
            if known:
                found[name] = float(sum(known))
            else:
                self._drop(name, "no register was free for it, or no core that we ran on counts it")
        return found

    def close(self) -> None:
        """Closing again does nothing."""
        for file in self._all():
            os.close(file)
        self._files.clear()

    def _drop(self, name: str, reason: str) -> None:
        for file in self._files.pop(name):
            os.close(file)
        self.missing[name] = reason

    def _all(self) -> list[int]:
        return [file for files in self._files.values() for file in files]


def _number_of_call() -> int | None:
    pair = _SYSCALLS.get(platform.machine())
    if pair is None or not Path("/proc/self/task").is_dir():
        return None
    return pair[0] if ctypes.sizeof(ctypes.c_void_p) == 8 else pair[1]


def _open(number: int, kind: int, config: int, thread: int) -> int:
    """The file of one event of one thread, on whatever core it runs. Raises OSError."""
    attributes = _Attributes(
        type=kind,
        size=ctypes.sizeof(_Attributes),
        config=config,
        read_format=_TIMES,
        flags=_DISABLED | _EXCLUDE_KERNEL | _EXCLUDE_HV,
    )
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    close_on_exec = 8
    arguments = (thread, -1, -1, close_on_exec)  # any core, no group
    file = call(
        ctypes.c_long(number), ctypes.byref(attributes), *(ctypes.c_long(a) for a in arguments)
    )
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(file)


def _read(file: int) -> float | None:
    """The scaled count; None for one that never ran while it was to."""
    value, enabled, running = struct.unpack("QQQ", os.read(file, 24))
    if not enabled:
        return 0.0  # the thread slept all the while
    return value * enabled / running if running else None


def _reason(error: OSError) -> str:
    words = _WORDS.get(error.errno or 0, error.strerror or "unknown")
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            level = Path("/proc/sys/kernel/perf_event_paranoid").read_text().strip()
            words += f" (kernel.perf_event_paranoid is {level}; 2 or less allows it)"
        except OSError:
            pass
    return words
