"""Copying a run's spool to the host until the run ends, over as many connections as it takes.

What is final (the end of a run, bytes that no engine writes) is told apart from trouble that may
pass: a link that drops, a board that is too short of memory to start a process, a slow line. The
latter is met with patience of limited length, a healthy run is never ended by it.
"""

from __future__ import annotations

import contextlib
import random
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.records import Event, RecordError
from engine.spool import EVENTS_NAME, LOG_LIMIT, SUPERVISOR_LOG_NAME, engine_log_name
from engine.watchdog import stacks_name
from harness.deadline import Deadline
from harness.deploy.cache import sha256_file
from harness.deploy.push import ask_board
from harness.errors import BoardError
from harness.jobs.runlog import ArrayReference, EventTail, RunLog

if TYPE_CHECKING:
    from harness.connect import BoardSession
    from harness.jobs.lifecycle import RemoteRun

FASTEST_POLL_S, SLOWEST_POLL_S = 0.2, 2.0
POLL_S = 30.0  # for one answer; the watchdog notices a dead link sooner
POLL_BYTES, LEAST_POLL_BYTES = 4 << 20, 16 << 10  # asked for at once; halved after a timeout
SLOWEST_BYTES_PER_S = 20_000  # a line slower than this is not served
PULL_S = 60.0  # for one array, beside the time that its bytes take on the slowest line
PULL_TRIES = 4  # of one array after the run has ended
RETRY_PAUSE_S = (0.5, 15.0)  # the first and the longest, before jitter
LAST_TRY_S = 15.0  # for a connection, once the user has asked to stop
CANCEL_S = 15.0
LASTING_KINDS = ("host-key", "auth")  # no second try mends these

# One look at a spool: boot_id, whether the supervisor lives (its pid and start time, so that a pid
# used again does not count), the boot_id that it was started in, then new bytes. It lives or not
# *before* the bytes are read: when it is dead they are its last. Shell, not Python, and builtins
# as far as they reach: this runs beside a measurement, on boards that are short of memory.
_LOOK = r"""
boot= began= pid= ticks= state=dead
IFS= read -r boot 2>/dev/null < /proc/sys/kernel/random/boot_id
cd {spool} 2>/dev/null || {{ echo "${{boot:--}} gone -"; exit 0; }}
[ ! -f supervisor.json ] || while IFS= read -r line; do
  value=${{line##*: }}
  value=${{value%,}}
  case $line in
    *'"pid": '[0-9]*) pid=$value;;
    *'"start_ticks": '[0-9]*) ticks=$value;;
    *'"boot_id": "'[0-9a-f]*) value=${{value#\"}}; began=${{value%\"}};;
  esac
done < supervisor.json
if [ -z "$pid" ]; then state=none
elif IFS= read -r line 2>/dev/null < "/proc/$pid/stat"; then
  set -- ${{line##*) }}
  [ "$1" != Z ] && [ "${{20}}" = "$ticks" ] && state=alive
elif [ ! -d /proc/self ]; then
  kill -0 "$pid" 2>/dev/null && state=alive
fi
echo "${{boot:--}} $state ${{began:--}}"
[ ! -f events.jsonl ] || tail -c +{start} events.jsonl | head -c {limit}
"""


class _Final(BoardError):
    """Trouble that no second look mends."""


class Follower:
    """One run, followed to its end; see `harness.jobs.lifecycle.follow`."""

    def __init__(
        self,
        open_session: Callable[[], BoardSession],
        run: RemoteRun,
        folder: Path,
        on_event: Callable[[Event], None] | None,
        deadline: Deadline,
        wants_cancel: Callable[[], bool],
        reconnect_s: float,
    ) -> None:
        self._open, self._run, self._folder = open_session, run, folder
        self._on_event, self._deadline, self._wants_cancel = on_event, deadline, wants_cancel
        self._reconnect_s = reconnect_s
        self._session: BoardSession | None = None
        self._board = f"of run {run.run_id}"  # until the first connection names it
        self._patience: Deadline | None = None  # while the board does not answer
        self._why: str | None = None  # why we want the run to end, once we do
        self._stop_by: Deadline | None = None  # once the board has taken the request
        self._began = time.monotonic()
        self._piece = POLL_BYTES
        self._silent = False  # a dead supervisor's spool had nothing new
        self._gone = False  # the spool is
        self._reset = ""  # how it is known that the board was restarted
        self._pull: dict[str, ArrayReference] = {}  # announced, not here yet
        self._pull_failures = 0
        self._tail: EventTail

    def follow(self) -> RunLog:
        try:
            self._tail = EventTail(self._folder / EVENTS_NAME, self._run.run_id)
        except RecordError:  # our own copy was harmed: the board still has the whole
            (self._folder / EVENTS_NAME).write_bytes(b"")
            self._tail = EventTail(self._folder / EVENTS_NAME, self._run.run_id)
        self._take(self._tail.events)
        self._drop_fetched()
        if self._tail.ended and not self._pull:
            return self._log(*self._told_end())
        failures = 0
        while True:
            last_try = self._wants_cancel()
            try:
                pause = self._cycle()
                if isinstance(pause, RunLog):
                    return pause
                failures = 0
            except _Final:
                raise
            except BoardError as error:
                failures += 1
                pause = self._pause_after(error, failures, last_try)
            self._wait(pause)

    def _cycle(self) -> RunLog | float:
        """One visit: the run's log when it has ended, else the seconds until the next."""
        session = self._connect()
        self._board = session.board.name
        self._obey(session)
        before = self._tail.offset
        end = self._look(session)
        self._patience = None
        if end is None or end[0] not in ("lost", "board-reset"):
            try:
                self._pull_arrays(session)
            except _Final:
                if not self._reset:
                    raise
                end = ("board-reset", self._reset)  # its file system lost what was announced
        if end is not None:
            return self._finish(session, *end)
        return self._next_pause(before)

    # --- patience -------------------------------------------------------------------------------

    def _connect(self) -> BoardSession:
        """The live session, or a new one, for which the board has what is left of our patience.

        A connection is opened on a thread of its own: the user's wish to stop does not wait for
        it. One that comes too late is the caller's, who has it from `open_session` next time.
        """
        if self._session is not None and self._session.alive:
            return self._session
        self._patience = self._patience or Deadline.after(self._reconnect_s, "reconnecting")
        opened: list[BoardSession] = []
        errors: list[BaseException] = []

        def dial() -> None:
            try:
                opened.append(self._open())
            except BaseException as error:  # raised below
                errors.append(error)

        thread = threading.Thread(target=dial, name=f"dial {self._board}", daemon=True)
        thread.start()
        until = self._patience
        while thread.is_alive() and not until.expired:
            thread.join(min(0.1, until.remaining))
            if self._wants_cancel():
                until = until.within(LAST_TRY_S) if until is self._patience else until
        if errors:
            raise errors[0]
        if not opened:
            raise BoardError(self._board, "unreachable", "no connection in time")
        self._session = opened[0]
        return self._session

    def _pause_after(self, error: BoardError, failures: int, last_try: bool) -> float:
        """Seconds until the next try after trouble. Raises when there is none."""
        if error.kind in LASTING_KINDS:
            raise error
        self._board = error.board or self._board
        if error.kind == "timeout":  # a slow line, perhaps
            self._piece = max(LEAST_POLL_BYTES, self._piece // 2)
        self._patience = self._patience or Deadline.after(self._reconnect_s, "reconnecting")
        if self._patience.expired or last_try:
            raise BoardError(
                self._board,
                "board-lost",
                f"not reached again within {self._reconnect_s:.0f} s: {error.found}"
                if not last_try
                else f"not reached to end the run: {error.found}",
                remedy="check its power and network; the run may go on there until its deadline",
            ) from error
        first, longest = RETRY_PAUSE_S
        # Jitter: after a switch restarts, all boards' threads would knock at once.
        pause = min(longest, first * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load, guards nothing
        return min(pause, self._patience.remaining)

    def _next_pause(self, before: int) -> float:
        """A tenth of the run's age: a short run is collected at once, and a long measurement is
        hardly disturbed by being looked at."""
        if self._tail.offset - before >= self._piece:
            return 0.0  # there is more
        age = time.monotonic() - self._began
        return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, age / 10))

    def _wait(self, seconds: float) -> None:
        until = Deadline.after(seconds)
        while not until.expired:
            if self._why is None and (self._wants_cancel() or self._deadline.expired):
                return
            time.sleep(min(0.1, until.remaining))

    def _obey(self, session: BoardSession) -> None:
        """Cancel the run on the board, once, when the caller or the deadline wants it."""
        if self._stop_by is not None:
            return
        if self._why is None and self._wants_cancel():
            self._why = "cancelled"
        elif self._why is None and self._deadline.expired:
            self._why = f"not done in time ({self._deadline.label})"
        if self._why is None:
            return
        request = {"do": "stop", "spool": self._run.spool, "wait_s": CANCEL_S}
        limit = Deadline.after(CANCEL_S + POLL_S, "cancelling")
        ask_board(session, self._run.deployment.python, request, limit)
        self._stop_by = Deadline.after(CANCEL_S, "ending a run")

    # --- events ---------------------------------------------------------------------------------

    def _look(self, session: BoardSession) -> tuple[str, str] | None:
        """One round trip: new events; the run's (status, reason) when it has ended."""
        boot, state, began, data = self._ask(session)
        known = str(self._tail.events[0].data.get("boot_id") or "") if self._tail.events else ""
        known = known or ("" if began == "-" else began)
        if known and boot not in ("-", known):
            self._reset = f"the board was restarted during the run: boot_id was {known}, is {boot}"
        if state == "gone":
            self._gone = True
            if self._tail.ended and self._told_end()[0] != "finished":
                return self._told_end()
            return self._lost(f"the spool {self._run.spool} is not on the board any more")
        before, garbage = len(self._tail.events), ""
        try:
            self._tail.feed(data)
        except RecordError as error:
            garbage = str(error)
        self._take(self._tail.events[before:])
        if garbage and self._reset:  # what a cut of power leaves of the last bytes
            return self._lost(f"its events end in what cannot be read ({garbage})")
        if garbage:
            raise self._protocol(garbage)
        if self._tail.ended:
            return self._told_end()
        if state != "alive" and len(data) < self._piece:
            if self._silent and not data:
                return self._lost("the supervisor is gone and told no end")
            self._silent = True  # once more: reading may have failed for want of memory
            return None
        self._silent = False
        if self._stop_by is not None and self._stop_by.expired:
            raise _Final(
                self._board,
                "timeout",
                f"run {self._run.run_id} was asked to end and goes on",
                remedy="a stuck driver can cause this; the clean-up kills it",
            )
        return None

    def _ask(self, session: BoardSession) -> tuple[str, str, str, bytes]:
        """What the board says: its boot_id, the run's state, the boot_id at its start, bytes."""
        script = _LOOK.format(
            spool=shlex.quote(self._run.spool), start=self._tail.offset + 1, limit=self._piece
        )
        result = session.run(
            script, deadline=Deadline.after(POLL_S, "looking at a run"), limit_bytes=2 * POLL_BYTES
        )
        head, _, data = result.stdout.partition(b"\n")
        fields = head.decode(errors="replace").split()
        if result.status != 0 or len(fields) != 3:
            said = result.stderr.decode(errors="replace").strip()[-200:]
            raise session.error(
                "transfer",
                f"looking at the spool gave status {result.status}: {said or head[:200]!r}",
            )
        return fields[0], fields[1], fields[2], data

    def _lost(self, found: str) -> tuple[str, str]:
        """The end of a run that told none."""
        if self._reset:
            return "board-reset", f"{self._reset}; {found}; {self._last_words()}"
        return "lost", f"{found}; {self._last_words()}"

    def _told_end(self) -> tuple[str, str]:
        """(status, reason) of the run-end event; a cancellation of ours says why we did it.

        An orderly reboot ends every process with SIGTERM, which to the supervisor is a request to
        cancel: one that did not come from here is no wish of the user.
        """
        end = self._tail.events[-1].data
        status, reason = str(end.get("status")), str(end.get("reason") or "")
        if status != "cancelled":
            return status, reason
        if self._why is not None:
            return ("cancelled" if self._why == "cancelled" else "deadline"), (
                f"{self._why}; {reason}"
            )
        if self._reset:
            return "board-reset", f"{self._reset}; the run told: {reason}"
        return "lost", f"the run was ended by something else than the harness: {reason}"

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if event.kind == "array":
                reference = ArrayReference.of(event)
                self._pull[reference.name] = reference
            if self._on_event is not None:
                self._on_event(event)

    def _last_words(self) -> str:
        """What is known of the end of a run that told none: the last event, the memory by then."""
        if not self._tail.events:
            return "it told no event"
        last = self._tail.events[-1]
        seconds = (last.t_ns - self._tail.events[0].t_ns) / 1e9
        text = f"the last event is {last.kind}, {seconds:.1f} s into the run"
        samples = [event.data for event in self._tail.events if event.kind == "sample"]
        if samples:
            rss, free = samples[-1].get("rss_mb"), samples[-1].get("mem_available_mb")
            text += f"; the engine held {rss} MB by then, {free} MB were available"
        return text

    def _protocol(self, found: str) -> BoardError:
        return _Final(
            self._board,
            "protocol",
            f"run {self._run.run_id}: {found}",
            expected="the events of this engine's version, in order",
            remedy="deploy the engine of this checkout; if it repeats, suspect the board's storage",
        )

    # --- files ----------------------------------------------------------------------------------

    def _drop_fetched(self) -> None:
        """Forget announcements whose file is here, whole."""
        for name, reference in list(self._pull.items()):
            target = self._folder / reference.file
            if target.is_file() and sha256_file(target) == reference.sha256:
                del self._pull[name]

    def _pull_arrays(self, session: BoardSession) -> None:
        """Fetch what was announced. An engine that was restarted may have written one again."""
        for name, reference in list(self._pull.items()):
            target = self._folder / reference.file
            target.parent.mkdir(exist_ok=True)
            seconds = PULL_S + reference.bytes / SLOWEST_BYTES_PER_S
            try:
                session.pull_file(
                    f"{self._run.spool}/{reference.file}",
                    target,
                    deadline=Deadline.after(seconds, f"fetching {reference.file}"),
                    limit_bytes=reference.bytes,
                    sha256=reference.sha256,
                )
            except BoardError as error:
                if not session.alive:
                    raise
                if not self._tail.ended:
                    if error.kind == "transfer":
                        continue  # it is being replaced; the event that says so is on its way
                    raise
                self._pull_failures += 1
                if self._pull_failures >= PULL_TRIES:
                    raise self._protocol(f"{reference.file} was announced: {error}") from error
                raise
            self._pull_failures = 0
            del self._pull[name]

    def _finish(self, session: BoardSession, status: str, reason: str) -> RunLog:
        if status != "finished" and not self._gone:
            reason = f"{reason}{self._fetch_logs(session)}"
        for partial in (self._folder / "arrays").glob("*.partial"):
            partial.unlink()
        return self._log(status, reason)

    def _log(self, status: str, reason: str) -> RunLog:
        return RunLog(self._run.run_id, self._tail.events, self._folder, status, reason)

    def _fetch_logs(self, session: BoardSession) -> str:
        """Copy the engine's and the supervisor's output beside the events; the last words of it."""
        told = [e.data.get("attempt") for e in self._tail.events if e.kind == "engine-start"]
        numbers = [item for item in told if type(item) is int and 0 <= item < 1_000_000][-20:]
        names = [engine_log_name(item) for item in numbers]
        if any(e.data.get("stacks") for e in self._tail.events if e.kind == "log"):
            names = [stacks_name(numbers[-1]), *names] if numbers else names
        said = ""
        limit = Deadline.after(POLL_S + LOG_LIMIT / SLOWEST_BYTES_PER_S, "fetching logs")
        for name in [*names, SUPERVISOR_LOG_NAME]:
            with contextlib.suppress(BoardError):  # evidence beside the point; it may not exist
                session.pull_file(
                    f"{self._run.spool}/{name}",
                    self._folder / name,
                    deadline=limit,
                    limit_bytes=2 * LOG_LIMIT,
                )
                text = (self._folder / name).read_text(errors="replace").strip()
                if text and not name.startswith("stacks."):
                    said = f"; {name} ends: {text.splitlines()[-1][-200:]}"
        return said
