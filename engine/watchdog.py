"""An engine that makes no progress: how long it has been silent, and where it stands by then.

Where it stands is written into the spool before the engine is ended, as `stacks.ATTEMPT.log`: what
the kernel tells of each thread, whatever state the process is in, and then the Python frames of
all threads, which the engine's own signal handler writes. That handler is C code of faulthandler:
it runs although a kernel never returns or a lock is never released, as long as one thread can take
a signal. A process that is stuck in a driver cannot, and has only the first half.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

ASK = signal.SIGUSR2  # "write where you stand": the engine's threads use no signal of their own
APART_S = 0.3  # between two looks at a thread's CPU time: busy or waiting?
ANSWER_S, QUIET_S = 3.0, 0.2  # for the frames to appear, and to be complete
MOST_THREADS, MOST_FRAMES = 64, 16  # of the kernel's part
MOST_BYTES = 16 << 10  # of the text that is told; the file holds all of it


def stacks_name(attempt: int) -> str:
    return f"stacks.{attempt}.log"


def answer_to_requests(path: Path) -> None:
    """From now on this process appends the Python frames of all its threads to `path` on ASK.

    Where the file cannot be made (a full disk) it stays deaf to ASK, and the run goes on.
    """
    with contextlib.suppress(OSError):
        # Never closed: the handler writes to its descriptor, in whatever state the process is.
        file = path.open("ab", buffering=0)
        faulthandler.register(ASK, file=file, all_threads=True, chain=False)


class Silence:
    """How long the engine has said nothing, in seconds that this process was awake.

    A board that was suspended, or was too busy to let the supervisor run, has not given the engine
    that time either.
    """

    def __init__(self, most_at_once_s: float) -> None:
        self._most = most_at_once_s
        self._seconds = 0.0
        self._looked = time.monotonic()

    def over(self) -> None:
        """The engine has said something, or has only just started."""
        self._seconds, self._looked = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Up to now; to be asked more often than `most_at_once_s`."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, self._most)
        self._looked = now
        return self._seconds


def capture(pid: int, path: Path) -> str:
    """Write to `path` where process `pid` stands; returns the text, cut to MOST_BYTES.

    Takes up to APART_S + ANSWER_S. Never raises for a process that ends meanwhile or a full disk.
    """
    text = kernel_view(pid)
    with contextlib.suppress(OSError), path.open("ab") as file:
        file.write(text.encode())
    before = _size(path)
    if not _answers(pid):
        text += "no Python frames: the process does not listen to the request\n"
        return text[:MOST_BYTES]
    with contextlib.suppress(OSError):
        os.kill(pid, ASK)
    written = _grown(path, before)
    if not written:
        written = f"no Python frames within {ANSWER_S:g} s: no thread of it can take a signal\n"
    return (text + written)[:MOST_BYTES]


def kernel_view(pid: int) -> str:
    """One line for each thread (state, what it waits in, CPU time by two looks), and its stack in
    the kernel where this user may read it."""
    first = _threads(pid)
    time.sleep(APART_S)
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [f"process {pid}, {len(first)} thread{'' if len(first) == 1 else 's'}"]
    for thread, (name, _, before) in sorted(first.items())[:MOST_THREADS]:
        folder = Path(f"/proc/{pid}/task/{thread}")
        now = _stat(folder)
        if now is None:
            lines.append(f"thread {thread} ({name}): it has ended")
            continue
        state, after = now
        busy = (after - before) / ticks
        where = _read(folder / "wchan").strip("0 \n")
        line = f"thread {thread} ({name}): state {state}, {busy:.2f} of {APART_S:.2f} s on a CPU"
        lines.append(line + (f", waits in {where}" if where else ""))
        frames = _read(folder / "stack").splitlines()[:MOST_FRAMES]
        lines += [f"    {frame.strip()}" for frame in frames]
    return "\n".join(lines) + "\n"


def _threads(pid: int) -> dict[int, tuple[str, str, int]]:
    """Of each thread: its name, state and CPU time in ticks."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in Path(f"/proc/{pid}/task").iterdir():
            told = _stat(folder)
            if told is not None:
                name = "".join(c if c.isprintable() else "?" for c in _read(folder / "comm")[:-1])
                found[int(folder.name)] = (name, *told)
    return found


def _stat(folder: Path) -> tuple[str, int] | None:
    """(state, ticks of user and system time) of /proc/…/stat; None once the thread has ended.

    The name in it may hold anything, ")" included: the fields begin behind the last one.
    """
    fields = _read(folder / "stat").rpartition(")")[2].split()
    if len(fields) < 13:
        return None
    return fields[0], int(fields[11]) + int(fields[12])


def _answers(pid: int) -> bool:
    """Whether the process handles ASK: one that does not would be killed by it."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (ASK - 1) & 1)
    return False


def _grown(path: Path, size: int) -> str:
    """What is appended to `path` beyond `size`, once it has not grown for QUIET_S."""
    until = time.monotonic() + ANSWER_S
    last, since = size, time.monotonic()
    while time.monotonic() < until:
        now = _size(path)
        if now != last:
            last, since = now, time.monotonic()
        elif now > size and time.monotonic() - since >= QUIET_S:
            break
        time.sleep(0.02)
    try:
        with path.open("rb") as file:
            file.seek(size)
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or this user may not
        return ""
