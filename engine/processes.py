"""What the supervisor needs of the operating system: boots, process identities, groups, the engine.

Linux gives all of it; elsewhere (a developer's machine) the parts that are missing are None or
do nothing, and the supervisor still works.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from engine.measure.sampler import Sampler
from engine.spool import CappedLog, LineSplitter

CHUNK = 1 << 16  # bytes of one read
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def boot_id() -> str:
    """An identity of the running boot of this board; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot: with the pid, the identity of a process.

    None when there is no such process, or no /proc.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def descendants() -> list[int]:
    """The live processes below this one, at any depth; zombies do not count."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return sorted(found)


def _stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the command name, which may hold anything: state is field 0 here.

    Read as that of its first thread, which started with the process: for a process under an
    emulator (qemu-user) the emulator makes up its own /proc/PID/stat, with the start of a parent.
    """
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 1 :].split()


def oom_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot; None where untold."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def signal_group(group: int, number: int) -> bool:
    """Send `number` to process group `group`; False when the group has no process left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group of zombies
        return False
    return True


def _prctl() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    return function  # type: ignore[no-any-return]  # ctypes functions carry no type


def adopt_orphans() -> None:
    """Let processes whose parent dies become children of this one, so that they can be reaped."""
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def child_setup(parent: int) -> Callable[[], None]:
    """What a new child runs before it becomes the engine: an own process group, and death with
    its supervisor, so that a killed supervisor leaves no engine behind."""
    prctl = _prctl()  # looked up before the fork: nothing is loaded in the child

    def setup() -> None:
        os.setpgid(0, 0)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the request
                os._exit(1)
        with contextlib.suppress(OSError):  # short of memory, the kernel takes the engine first
            Path("/proc/self/oom_score_adj").write_text("500")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    return setup


def redirect_streams(output: Path) -> None:
    """Point stdin to nothing, stdout and stderr to `output`: no stream of a caller stays open."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (nothing, log):
        if fd > 2:
            os.close(fd)


def close_inherited(keep: int) -> int:
    """Close every descriptor above 2 but `keep`, whose new number is returned.

    A caller's pipe held open would keep the caller waiting for its end.
    """
    os.dup2(keep, 3, inheritable=False)
    with contextlib.suppress(ValueError, OSError):
        limit = os.sysconf("SC_OPEN_MAX")
        os.closerange(4, limit if 4 < limit < 65536 else 65536)
    return 3


class EngineProcess:
    """One engine process, its event pipe, its output, and its end."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], folder: Path, log: CappedLog
    ) -> None:
        self.splitter = LineSplitter()
        self._log = log
        self.status: int | None = None
        self._usage: Mapping[str, float] = {}
        self._events, events_write = os.pipe()
        os.set_inheritable(events_write, True)
        try:
            # A handle of ours is reaped by wait4 below, for the rusage that Popen cannot give.
            self._process = subprocess.Popen(
                command(events_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                pass_fds=(events_write,),
                preexec_fn=child_setup(os.getpid()),  # the supervisor has one thread
            )
        finally:
            os.close(events_write)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self.open_fds = [self._events, self._output]
        for fd in self.open_fds:
            os.set_blocking(fd, False)
        self.sampler = Sampler(self.pid)
        self._began = time.monotonic()

    def read_events(self) -> list[bytes]:
        return [line for chunk in self._drain(self._events) for line in self.splitter.feed(chunk)]

    def read_output(self) -> None:
        for chunk in self._drain(self._output):
            self._log.write(chunk)

    def _drain(self, fd: int) -> list[bytes]:
        """What can be read now, a bounded part: the deadline must not wait for a flood."""
        chunks: list[bytes] = []
        while fd in self.open_fds and len(chunks) < 64:
            try:
                chunk = os.read(fd, CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                self.open_fds.remove(fd)  # the engine closed it
                break
            chunks.append(chunk)
        return chunks

    def reap(self) -> bool:
        """Whether the engine has ended; its status and resource use are kept."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.status = status
        self._process.returncode = os.WEXITSTATUS(status)  # Popen must not wait for it again
        self._usage = {
            "seconds": round(time.monotonic() - self._began, 3),
            "user_s": usage.ru_utime,
            "system_s": usage.ru_stime,
            # kilobytes on Linux, bytes on macOS: getrusage(2)
            "max_rss_mb": round(
                usage.ru_maxrss / (1024 if sys.platform != "darwin" else 1 << 20), 3
            ),
            "minor_faults": usage.ru_minflt,
            "major_faults": usage.ru_majflt,
            "voluntary_switches": usage.ru_nvcsw,
            "involuntary_switches": usage.ru_nivcsw,
        }
        return True

    def exit_data(self) -> dict[str, Any]:
        assert self.status is not None
        data: dict[str, Any] = {
            "pid": self.pid,
            "wait_status": self.status,
            "core": os.WCOREDUMP(self.status),
            "rusage": self._usage,
        }
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            data["signal"] = signal.Signals(number).name if number < 32 else f"signal {number}"
        else:
            data["code"] = os.WEXITSTATUS(self.status)
        return data

    def close(self) -> None:
        os.close(self._events)
        assert self._process.stdout is not None
        self._process.stdout.close()
