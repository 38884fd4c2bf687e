"""In-order queues, one thread each, and the events between them.

An event is a count: how many times an act is over. A job begins when it is the first of its queue
and the events it waits for have come. The caller submits, waits for events itself, and is the one
that errors are raised to.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Event = tuple[str, int]  # an act, and how many times it must be over


class ExecutorStuck(RuntimeError):
    """Nothing moved for as long as the deadline allows; the message says where each queue is.

    `evidence` holds who waits for whom, as plain JSON.
    """

    def __init__(self, message: str, waits: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(message)
        self.evidence: dict[str, Any] = {"waits": [dict(wait) for wait in waits]}


class Cancelled(Exception):
    """Raised inside a job whose pause was ended by `stop`; nobody else sees it."""


@dataclasses.dataclass(frozen=True)
class Job:
    """`place` orders jobs: of several errors, the one with the smallest place is raised."""

    name: str
    place: tuple[int, int]
    waits: tuple[Event, ...]
    work: Callable[[], None]


class Queues:
    """Threads start with the first job and end with `stop`, or when an error was raised."""

    def __init__(self, names: Iterable[str], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self._names = tuple(names)
        self._jobs: dict[str, deque[Job]] = {name: deque() for name in self._names}
        self._doing: dict[str, str] = {}  # queue → what it is at, for a diagnosis
        self._waiting: dict[str, Job] = {}  # queue → the job whose events it waits for
        self._given: dict[str, int] = {}  # act → how often it was submitted, or over before
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._counts: dict[str, int] = {}
        self._failure: tuple[tuple[int, int], BaseException] | None = None

    @property
    def running(self) -> bool:
        return bool(self._threads)

    def start(self, counts: Mapping[str, int]) -> None:
        """Start the threads, with `counts` of what is already over."""
        self._stop.clear()
        self._counts, self._given = dict(counts), dict(counts)
        for name in self._names:
            thread = threading.Thread(
                target=self._serve, args=(name,), name=f"engine-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def submit(self, queue: str, job: Job) -> None:
        """Raises the error of an earlier job instead, if there was one."""
        with self.changed:
            if self._failure is None:
                self._jobs[queue].append(job)
                self._given[job.name] = self._given.get(job.name, 0) + 1
                self.changed.notify_all()
                return
        self._raise_failure()

    def wait(self, events: Iterable[Event], who: str) -> None:
        """The caller waits. Raises a job's error, or ExecutorStuck when nothing moves."""
        pending = list(events)
        what = f"{who} waits for {self._missing(pending)}"
        self._wait_until(lambda: self._over(pending), what, pending)
        if self._failure is not None:
            self._raise_failure()

    def drain(self) -> None:
        """Wait until every queue is empty; raises as `wait` does."""
        self._wait_until(self._idle, "the caller waits for all queues")
        if self._failure is not None:
            self._raise_failure()

    def pause(self, seconds: float) -> None:
        """For jobs: sleep, unless the queues are stopped."""
        if self._stop.wait(seconds):
            raise Cancelled

    def stop(self) -> BaseException | None:
        """Drop what is queued, let running jobs end, join the threads.

        Returns an error that no caller has got yet. Raises ExecutorStuck when a job does not end.
        """
        with self.changed:
            self._stop.set()
            for jobs in self._jobs.values():
                jobs.clear()
            self.changed.notify_all()
        end, own = time.monotonic() + self.deadline_s, threading.current_thread()
        for thread in self._threads:
            # Not one that was never started; nor its own, where a job held the last reference.
            if thread.ident is not None and thread is not own:
                thread.join(max(0.0, end - time.monotonic()))
        alive = [thread.name for thread in self._threads if thread.is_alive() and thread is not own]
        failure, self._failure = self._failure, None
        if alive:
            raise ExecutorStuck(
                f"{', '.join(alive)} did not end within {self.deadline_s:g} s: {self._diagnosis()}"
            )
        self._threads.clear()
        return failure[1] if failure else None

    def _over(self, events: Iterable[Event]) -> bool:
        return all(self._counts.get(act, 0) >= count for act, count in events)

    def _missing(self, events: Iterable[Event]) -> str:
        return ", ".join(act for act, count in events if self._counts.get(act, 0) < count)

    def _idle(self) -> bool:
        return not any(self._jobs.values()) and not self._doing

    def _dropped(self, job: Job) -> bool:
        """Whether a job shall not begin: those before a failed one still do, so that of several
        errors the first in program order is found."""
        return self._stop.is_set() or (self._failure is not None and job.place > self._failure[0])

    def _wait_until(
        self, ready: Callable[[], bool], what: str, pending: Sequence[Event] = ()
    ) -> None:
        with self.changed:
            while not ready() and self._failure is None:
                # Woken by progress alone, so that an expired wait means there was none.
                if not self.changed.wait(self.deadline_s):
                    raise ExecutorStuck(
                        f"no op ended for {self.deadline_s:g} s while {what}: {self._diagnosis()}",
                        self._waits(pending),
                    )

    def _raise_failure(self) -> None:
        """Raises the error of the first failed job in program order; the threads are joined."""
        with self.changed:
            while not self._idle() and self.changed.wait(self.deadline_s):
                pass
        error = self.stop()
        if error is not None:
            raise error

    def _diagnosis(self) -> str:
        at = [f"{name} {self._doing.get(name, 'is idle')}" for name in self._names]
        return "; ".join(at)

    def _waits(self, pending: Sequence[Event]) -> list[dict[str, str]]:
        """Who waits for what, and which queue has that; "" for an act that was given to a queue and
        that none has any more: its end was not counted."""
        waiting = [("the caller", "", pending)]
        waiting += [(name, job.name, job.waits) for name, job in self._waiting.items()]
        found = []
        for who, before, events in waiting:
            for act, count in events:
                if self._counts.get(act, 0) < count:
                    holder = self._holder(act, count)
                    wait = {"who": who, "before": before, "op": act, "held_by": holder}
                    found.append(wait)
        return found

    def _holder(self, act: str, count: int) -> str:
        """The queue that has `act`, at hand or behind other jobs; the caller before it gave it."""
        for name in self._names:
            if any(job.name == act for job in self._jobs[name]):
                return name
            waiting = self._waiting.get(name)
            if waiting is not None and waiting.name == act:
                return name
            if self._doing.get(name) == f"is at {act}":
                return name
        return "" if self._given.get(act, 0) >= count else "the caller"

    def _serve(self, name: str) -> None:
        jobs = self._jobs[name]
        while True:
            with self.changed:
                while not jobs and not self._stop.is_set():
                    self.changed.wait()
                if self._stop.is_set():
                    return
                job = jobs.popleft()
                self._doing[name] = f"is at {job.name}"
                while not self._over(job.waits) and not self._dropped(job):
                    self._doing[name] = f"waits before {job.name} for {self._missing(job.waits)}"
                    self._waiting[name] = job
                    self.changed.wait()
                self._waiting.pop(name, None)
                dropped = self._dropped(job)
                self._doing[name] = f"is at {job.name}"
            error: BaseException | None = None
            if not dropped:
                try:
                    job.work()
                except BaseException as raised:  # whatever it is, it belongs to the caller
                    error = raised
            with self.changed:
                del self._doing[name]
                if error is None and not dropped:
                    self._counts[job.name] = self._counts.get(job.name, 0) + 1
                elif error is not None and not isinstance(error, Cancelled):
                    first = self._failure is None or job.place < self._failure[0]
                    self._failure = (job.place, error) if first else self._failure
                self.changed.notify_all()
            del job, error  # they hold on to the executor, which may be dropped meanwhile
