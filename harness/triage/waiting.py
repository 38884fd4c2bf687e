"""Who waits for whom: the queues' own account, and what the kernel says of each thread."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.triage.output import parse_threads

WAITS_LIMIT = 64
_THREAD = re.compile(
    r"^thread (?P<id>\d{1,10}) \((?P<name>[^\n]{0,64}?)\): state (?P<state>[A-Za-z]), "
    r"(?P<busy>\d{1,6}\.\d{2}) of (?P<of>\d{1,6}\.\d{2}) s on a CPU"
    r"(?:, waits in (?P<wchan>\S{1,80}))?$",
    re.MULTILINE,
)
# kernel/futex of Linux; "do_futex" where symbols are cut
_LOCKS = ("futex", "rwsem", "mutex")


@dataclasses.dataclass(frozen=True)
class Wait:
    """`who`, a queue or the caller, waits (before op `before`) for op `op`, which `held_by` has."""

    who: str
    before: str
    op: str
    held_by: str  # "": nobody has it, though it was given to a queue

    def __str__(self) -> str:
        before = f" before {self.before}" if self.before else ""
        holder = f"which {self.held_by} has" if self.held_by else "which nobody has"
        return f"{self.who} waits{before} for {self.op}, {holder}"


@dataclasses.dataclass(frozen=True)
class ThreadState:
    """One thread as the kernel saw it. `state` is that of /proc/…/stat."""

    id: int
    name: str
    state: str
    busy_s: float
    of_s: float
    wchan: str

    @property
    def busy(self) -> bool:
        """It ran for most of the time between two looks, or as much as a busy board let it."""
        return self.busy_s >= 0.5 * self.of_s > 0 or (self.state == "R" and self.busy_s > 0)

    @property
    def waits_for_lock(self) -> bool:
        """It slept, in a lock as far as the kernel tells where."""
        sleeps = self.state == "S" and self.busy_s < 0.1 * max(self.of_s, 0.01)
        return sleeps and (not self.wchan or any(name in self.wchan for name in _LOCKS))

    def __str__(self) -> str:
        where = f", waits in {self.wchan}" if self.wchan else ""
        return f"{self.name}: state {self.state}, {self.busy_s:.2f} of {self.of_s:.2f} s{where}"


def waits_of(error: Mapping[str, Any]) -> tuple[Wait, ...]:
    """The waits in an ExecutorStuck error; () for any other, and for what cannot be read."""
    evidence = error.get("evidence")
    told = evidence.get("waits") if isinstance(evidence, Mapping) else None
    found = []
    for item in told[:WAITS_LIMIT] if isinstance(told, list) else ():
        if isinstance(item, Mapping) and isinstance(item.get("op"), str):
            words = (str(item.get(name) or "")[:200] for name in ("who", "before", "op", "held_by"))
            found.append(Wait(*words))
    return tuple(found)


def cycle(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """Waits that form a ring, each for what the next one has; () without one."""
    for start in waits:
        path: list[Wait] = []
        if _follow(start, waits, path, start.who):
            return tuple(path)
    return ()


def _follow(wait: Wait, waits: Sequence[Wait], path: list[Wait], start: str) -> bool:
    path.append(wait)
    if wait.held_by == start:
        return True
    seen = {item.who for item in path}
    for following in waits:
        new = following.who == wait.held_by and following.who not in seen
        if new and _follow(following, waits, path, start):
            return True
    path.pop()
    return False


def states(text: str) -> tuple[ThreadState, ...]:
    """The kernel's part of a look at a process (engine.watchdog.kernel_view)."""
    return tuple(
        ThreadState(
            int(match["id"]),
            match["name"],
            match["state"],
            float(match["busy"]),
            float(match["of"]),
            match["wchan"] or "",
        )
        for match in _THREAD.finditer(text)
    )


def standing(text: str) -> str:
    """The innermost Python frame of the main thread as "file.py:12 function"; "" without one.

    faulthandler prints threads one after the other, the main one last, innermost frames first.
    """
    threads = parse_threads(text)
    return str(threads[-1].frames[0]) if threads and threads[-1].frames else ""
