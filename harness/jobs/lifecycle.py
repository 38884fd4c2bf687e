"""A run on a board, from the host: start it, find it again, follow it, cancel it, clean up.

The run belongs to the board's supervisor. A link that drops, or a harness that is killed, changes
nothing about it: `find` and `follow` go on from the byte where the host's copy of the spool ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.records import Event, RecordError, RunSpec
from engine.spool import (
    EVENTS_NAME,
    LOG_LIMIT,
    SPEC_NAME,
    SUPERVISOR_LOG_NAME,
    SUPERVISOR_NAME,
    engine_log_name,
)
from harness.deadline import Deadline
from harness.deploy.cache import sha256_file
from harness.deploy.push import Deployment, ask_board
from harness.errors import BoardError
from harness.jobs.runlog import ArrayReference, EventTail, RunLog

if TYPE_CHECKING:
    from harness.connect import BoardSession

__all__ = ["RemoteRun", "RunLog", "cancel", "clean_up", "find", "follow", "start"]

FASTEST_POLL_S, SLOWEST_POLL_S = 0.2, 2.0
POLL_S = 30.0  # for one answer; the watchdog notices a dead link sooner
POLL_BYTES = 4 << 20
PULL_S = 300.0  # for one array
START_S = 60.0  # Python's start on a slow card, included
RECONNECTS = 8  # in a row; with the pauses below about two minutes
RECONNECT_PAUSE_S = (0.5, 30.0)  # the first and the longest, before jitter
CANCEL_S = 15.0
# Trouble of the link, after which the run may well go on.
LINK_TROUBLE = ("unreachable", "board-lost", "timeout", "transfer")

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# One look at a spool: boot_id, whether the supervisor lives (its pid and start time, so that a pid
# used again does not count), then new bytes. It lives or not *before* the bytes are read: when it
# is dead they are its last. Shell, not Python: this runs beside a measurement.
_LOOK = r"""
cd {spool} 2>/dev/null || {{ echo "- gone"; exit 0; }}
read -r boot < /proc/sys/kernel/random/boot_id || boot=-
field() {{ sed -n 's/^ *"'"$1"'": \([0-9][0-9]*\),*$/\1/p' supervisor.json; }}
pid=$(field pid) ticks=$(field start_ticks) state=dead
if [ -z "$pid" ]; then state=none
elif [ -r "/proc/$pid/stat" ]; then
  set -- $(sed 's/.*) //' "/proc/$pid/stat")
  [ "$1" != Z ] && [ "${{20}}" = "$ticks" ] && state=alive
elif [ ! -d /proc/self ]; then
  kill -0 "$pid" 2>/dev/null && state=alive
fi
echo "${{boot:--}} $state"
[ ! -f events.jsonl ] || tail -c +{start} events.jsonl | head -c {limit}
"""


@dataclasses.dataclass(frozen=True)
class RemoteRun:
    """A run that was started: where its spool lies on the board."""

    run_id: str
    spool: str
    deployment: Deployment


def start(
    session: BoardSession,
    deployment: Deployment,
    spec: RunSpec,
    inputs: Path | None,
    *,
    environment: Mapping[str, str],
    deadline: Deadline,
) -> RemoteRun:
    """Send spec and inputs and start the supervisor, detached. A run that is there is not repeated.

    Raises BoardError "engine" with the supervisor's own words when it does not start.
    """
    run = _remote(deployment, spec.run_id)
    spool = shlex.quote(run.spool)
    # Starting twice must be harmless: the answer to the first start may have been lost on the way.
    look = f"if [ -f {spool}/{EVENTS_NAME} ]; then echo there; else mkdir -p {spool}; fi"
    made = session.run(look, deadline=deadline)
    if made.status != 0:
        raise _engine_error(session, "its folder cannot be made", made.stderr)
    if made.stdout.strip() == b"there":
        return run
    try:
        _send_and_launch(session, run, spec, inputs, environment, deadline)
    except BaseException:
        if session.alive:  # otherwise the run may be going: `find` will tell
            with contextlib.suppress(BoardError):
                clean_up(session, deployment, run, Deadline.after(POLL_S, "removing a spool"))
        raise
    return run


def _send_and_launch(
    session: BoardSession,
    run: RemoteRun,
    spec: RunSpec,
    inputs: Path | None,
    environment: Mapping[str, str],
    deadline: Deadline,
) -> None:
    deployment = run.deployment
    # What the run needs of the work folder: a later deployment does not remove it.
    record = "\n".join([deployment.environment["PYTHONPATH"], *deployment.paths.values()])
    session.push_bytes(record.encode(), f"{run.spool}/deployment.txt", deadline=deadline)
    if inputs is not None:
        session.push_file(inputs, f"{run.spool}/inputs.npz", deadline=deadline)
        spec = dataclasses.replace(spec, inputs=f"{run.spool}/inputs.npz")
    session.push_bytes(spec.to_json().encode(), f"{run.spool}/{SPEC_NAME}", deadline=deadline)
    variables = {**environment, **deployment.environment, "ENGINE_RUN_ID": spec.run_id}
    command = ["env", *(f"{name}={value}" for name, value in variables.items())]
    command += [*deployment.python, "-m", "engine", "run", f"{run.spool}/{SPEC_NAME}"]
    command += ["--spool", run.spool, "--detach"]
    # Python imports first from the folder it is started in: not from the user's home.
    script = f"cd {shlex.quote(run.spool)} && exec {shlex.join(command)}"
    started = session.execute(  # titled: the command holds values of the board's environment
        script, deadline=deadline.within(START_S), title="starting the engine"
    )
    if started.status != 0:
        raise _engine_error(session, "the supervisor did not start", started.stderr)


def _remote(deployment: Deployment, run_id: str) -> RemoteRun:
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"run id {run_id!r}: expected letters, digits, '.', '_', '-'")
    return RemoteRun(run_id, f"{deployment.root}/runs/{run_id}", deployment)


def _engine_error(session: BoardSession, what: str, stderr: bytes) -> BoardError:
    said = stderr.decode(errors="replace").strip()[-1000:]
    return BoardError(
        session.board.name,
        "engine",
        f"{what}: {said or 'no message'}",
        remedy="the board's own message stands above; `harness boards probe` shows what it offers",
    )


def find(session: BoardSession, deployment: Deployment, run_id: str) -> RemoteRun | None:
    """The run on the board, going on or ended; None if it was never started there."""
    run = _remote(deployment, run_id)
    path = f"{run.spool}/{SUPERVISOR_NAME}"
    result = session.run(["test", "-f", path], deadline=Deadline.after(POLL_S, "finding a run"))
    return run if result.status == 0 else None


def cancel(session: BoardSession, run: RemoteRun, deadline: Deadline) -> None:
    """Ask the supervisor to end the run and wait until it has; nothing happens to an ended one.

    Raises BoardError "timeout" when it does not end: `clean_up` then uses force.
    """
    request = {"do": "stop", "spool": run.spool, "wait_s": min(CANCEL_S, deadline.remaining)}
    if ask_board(session, run.deployment.python, request, deadline)["alive"]:
        raise BoardError(
            session.board.name,
            "timeout",
            f"the supervisor of run {run.run_id} did not end in {request['wait_s']:.0f} s",
            remedy="a stuck driver can cause this; the clean-up kills it",
        )


def clean_up(
    session: BoardSession, deployment: Deployment, run: RemoteRun, deadline: Deadline
) -> list[str]:
    """End every process of the run, verify that none is left, remove its spool.

    Returns what resisted, one text each; empty when the board is clean. May be called again.
    """
    request = {"do": "clean", "spool": run.spool, "run_id": run.run_id}
    left = ask_board(session, deployment.python, request, deadline)["left"]
    return [str(item) for item in left]


def follow(
    open_session: Callable[[], BoardSession],
    run: RemoteRun,
    folder: Path,
    *,
    on_event: Callable[[Event], None] | None = None,
    deadline: Deadline,
    cancel: Callable[[], bool] = lambda: False,
) -> RunLog:
    """Copy the run's spool into `folder` until it ends, over as many connections as it takes.

    `open_session` gives a live session: the one in use as long as it lives. `on_event` is told
    every event once, those already in `folder` first. When `deadline` passes or `cancel` answers
    True, the run is cancelled on the board and collected to its end.

    Raises BoardError: "protocol" when the board sends what is not the next event of this run;
    "board-lost", "unreachable" or "timeout" when it cannot be reached again: the run may go on
    there. A board that was reset, and a supervisor that was killed, are ends of the run: the log's
    status is "board-reset" or "lost" and its reason holds the evidence.
    """
    return _Follower(open_session, run, folder, on_event, deadline, cancel).follow()


class _Follower:
    def __init__(
        self,
        open_session: Callable[[], BoardSession],
        run: RemoteRun,
        folder: Path,
        on_event: Callable[[Event], None] | None,
        deadline: Deadline,
        wants_cancel: Callable[[], bool],
    ) -> None:
        self._open, self._run, self._folder = open_session, run, folder
        self._on_event, self._deadline, self._wants_cancel = on_event, deadline, wants_cancel
        self._board = ""
        self._stopping: str | None = None  # why we ended the run, once we did
        self._stop_by: Deadline | None = None
        self._began = time.monotonic()
        self._pull: dict[str, ArrayReference] = {}  # announced, not here yet
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
            try:
                session = self._open()
                self._board = session.board.name
                self._obey(session)
                before = self._tail.offset
                end = self._look(session)
                self._pull_arrays(session)
                failures = 0
                if end is not None:
                    return self._finish(session, *end)
                pause = self._next_pause(before)
            except BoardError as error:
                failures += 1
                patience = failures <= RECONNECTS and not self._out_of_time
                if error.kind not in LINK_TROUBLE or not patience:
                    raise
                first, longest = RECONNECT_PAUSE_S
                # Jitter: after a switch restarts, all boards' threads would knock at once.
                pause = min(longest, first * 2 ** (failures - 1)) * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load, guards nothing
            self._wait(pause)

    @property
    def _out_of_time(self) -> bool:
        return self._deadline.remaining == 0.0 and self._stopping is not None

    def _next_pause(self, before: int) -> float:
        """A tenth of the run's age: a short run is collected at once, and a long measurement is
        hardly disturbed by being looked at."""
        if self._tail.offset - before >= POLL_BYTES:
            return 0.0  # there is more
        age = time.monotonic() - self._began
        return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, age / 10))

    def _wait(self, seconds: float) -> None:
        until = Deadline.after(seconds)
        while not until.expired:
            if self._stopping is None and (self._wants_cancel() or self._deadline.expired):
                return
            time.sleep(min(0.1, until.remaining))

    def _obey(self, session: BoardSession) -> None:
        """Cancel the run on the board, once, when the caller or the deadline wants it."""
        if self._stopping is not None:
            return
        if self._wants_cancel():
            why = "cancelled"
        elif self._deadline.expired:
            why = f"not done in time ({self._deadline.label})"
        else:
            return
        request = {"do": "stop", "spool": self._run.spool, "wait_s": CANCEL_S}
        limit = Deadline.after(CANCEL_S + POLL_S, "cancelling")
        ask_board(session, self._run.deployment.python, request, limit)
        self._stopping, self._stop_by = why, Deadline.after(CANCEL_S, "ending a run")

    def _look(self, session: BoardSession) -> tuple[str, str] | None:
        """One round trip: new events; the run's (status, reason) when it has ended."""
        script = _LOOK.format(
            spool=shlex.quote(self._run.spool), start=self._tail.offset + 1, limit=POLL_BYTES
        )
        result = session.run(
            script, deadline=Deadline.after(POLL_S, "looking at a run"), limit_bytes=2 * POLL_BYTES
        )
        head, _, data = result.stdout.partition(b"\n")
        fields = head.decode(errors="replace").split()
        if result.status != 0 or len(fields) != 2:
            raise self._protocol(
                f"looking at the spool gave status {result.status}: {head[:200]!r}"
            )
        boot, state = fields
        if state == "gone":
            return "lost", f"the spool {self._run.spool} is not on the board any more"
        try:
            new = self._tail.feed(data)
        except RecordError as error:
            raise self._protocol(str(error)) from error
        self._take(new)
        if self._tail.ended:
            return self._told_end()
        first = self._tail.events[0].data.get("boot_id") if self._tail.events else None
        if first and boot not in ("-", first):
            return "board-reset", (
                f"the board was restarted during the run: boot_id was {first}, is {boot}; "
                f"{self._last_words()}"
            )
        if state != "alive" and len(data) < POLL_BYTES:
            return "lost", f"the supervisor is gone and told no end; {self._last_words()}"
        if self._stop_by is not None and self._stop_by.expired:
            raise BoardError(
                self._board,
                "timeout",
                f"run {self._run.run_id} was asked to end and goes on",
                remedy="a stuck driver can cause this; the clean-up kills it",
            )
        return None

    def _told_end(self) -> tuple[str, str]:
        """(status, reason) of the run-end event; a cancellation of ours says why we did it."""
        end = self._tail.events[-1].data
        status, reason = str(end.get("status")), str(end.get("reason") or "")
        if self._stopping is not None and status == "cancelled":
            status = "cancelled" if self._stopping == "cancelled" else "deadline"
            reason = f"{self._stopping}; {reason}"
        return status, reason

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "array":
                reference = ArrayReference.of(event)
                self._pull[reference.name] = reference
            if self._on_event is not None:
                self._on_event(event)

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
            limit = Deadline.after(PULL_S, f"fetching {reference.file}")
            remote = f"{self._run.spool}/{reference.file}"
            try:
                session.pull_file(remote, target, deadline=limit, limit_bytes=reference.bytes)
            except BoardError as error:
                if not session.alive or not self._tail.ended:
                    raise
                raise self._protocol(f"{reference.file} was announced: {error}") from error
            if sha256_file(target) == reference.sha256:
                del self._pull[name]
                continue
            target.unlink()
            # Otherwise it is being replaced; the event that says so is on its way.
            if self._tail.ended:
                raise self._protocol(f"{reference.file} differs from its announced hash")

    def _finish(self, session: BoardSession, status: str, reason: str) -> RunLog:
        if status != "finished":
            reason = f"{reason}{self._fetch_logs(session)}"
        return self._log(status, reason)

    def _log(self, status: str, reason: str) -> RunLog:
        return RunLog(self._run.run_id, self._tail.events, self._folder, status, reason)

    def _fetch_logs(self, session: BoardSession) -> str:
        """Copy the engine's and the supervisor's output beside the events; the last words of it."""
        attempts = [e.data.get("attempt") for e in self._tail.events if e.kind == "engine-start"]
        names = [engine_log_name(item) for item in attempts[-20:] if isinstance(item, int)]
        said = ""
        for name in [*names, SUPERVISOR_LOG_NAME]:
            with contextlib.suppress(BoardError):  # evidence beside the point; it may not exist
                session.pull_file(
                    f"{self._run.spool}/{name}",
                    self._folder / name,
                    deadline=Deadline.after(POLL_S, "fetching a log"),
                    limit_bytes=2 * LOG_LIMIT,
                )
                text = (self._folder / name).read_text(errors="replace").strip()
                if text:
                    said = f"; {name} ends: {text.splitlines()[-1][-200:]}"
        return said

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
        return BoardError(
            self._board,
            "protocol",
            f"run {self._run.run_id}: {found}",
            expected="the events of this engine's version, in order",
            remedy="deploy the engine of this checkout; if it repeats, suspect the board's storage",
        )
