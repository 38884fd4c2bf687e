"""`python -m engine run SPEC --spool DIR`: runs one engine under watch and tells it in a spool.

The supervisor is small and outlives the connection that started it. It starts the engine in a
process group of its own, numbers what the engine says, samples it, restarts it where the spec
plans to, and ends it at the deadline, after too long a silence or on SIGTERM. Whatever happens to
the engine, the last event of a spool is `run-end`; a spool without one tells that the supervisor
itself was killed (and the engine with it, by PR_SET_PDEATHSIG) or that the board went down.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import processes
from engine.evidence import Evidence, lean
from engine.processes import EngineProcess
from engine.records import RecordError, RunSpec
from engine.spool import (
    EVENTS_LIMIT,
    SPEC_NAME,
    SUPERVISOR_LOG_NAME,
    SUPERVISOR_NAME,
    CappedLog,
    SpoolError,
    SpoolFull,
    SpoolWriter,
    engine_log_name,
    parse_engine_line,
    write_whole,
)
from engine.watchdog import Silence, capture, stacks_name

GRACE_S = 5.0  # between SIGTERM and SIGKILL
MAX_KILLS = 3  # SIGKILLs that an engine may outlive before the supervisor gives up on it
GONE_S = 5.0  # how long a killed group may take to disappear
DETACH_S = 30.0  # until a detached supervisor has said that it runs
MIN_SAMPLE_PERIOD_S = 0.05
LOOK_S = 5.0  # of silence at the deadline: where the engine stands is then worth knowing

# (spec file, spool, events fd, attempt) → argv of the engine
WorkerCommand = Callable[[Path, Path, int, int], Sequence[str]]


def engine_command(spec: Path, spool: Path, events_fd: int, attempt: int) -> list[str]:
    """The engine proper. `-S -s`: nothing that happens to be installed on the board is imported."""
    command = [sys.executable, "-S", "-s", "-X", "faulthandler", "-m", "engine", "work"]
    command += [str(spec), "--spool", str(spool)]
    return [*command, "--events-fd", str(events_fd), "--attempt", str(attempt)]


class Supervisor:
    """One run. `run` returns its status: finished, failed, cancelled, deadline or hung."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        *,
        command: WorkerCommand = engine_command,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        self.spec, self.folder = spec, folder
        self._command, self._on_started = command, on_started
        self._spool = SpoolWriter(folder)
        self._restarts = sorted(spec.restarts, key=lambda item: item.at_s)
        for restart in self._restarts:
            signal_number(restart.signal)
        self._began = time.monotonic()
        self._attempt = 0
        self._engine: EngineProcess | None = None
        self._stop: tuple[str, str] | None = None  # (status, reason) once the end is decided
        self._planned: str | None = None  # the reason of the restart under way
        self._kill_at: float | None = None  # when patience with the engine ends
        self._kills = 0
        self._period_s = max(spec.sample_period_s, MIN_SAMPLE_PERIOD_S)
        self._silence = Silence(2 * self._period_s + 1)
        self._signals: list[int] = []
        self._last_error = ""
        self._oom_kills = processes.oom_kills()
        self._evidence = Evidence(folder)

    def run(self) -> str:
        """Start the engine, watch it to its end, close the spool."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda found, frame: self._signals.append(found))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        processes.adopt_orphans()
        try:
            self._tell_start()
            status, reason = self._watch(wake_read)
        except SpoolFull as error:
            self._end_engine_now()
            status, reason = "failed", str(error)
        except Exception as error:  # the spool must end with a reason, whatever went wrong here
            traceback.print_exc()
            self._end_engine_now()
            status, reason = "failed", f"supervisor: {type(error).__name__}: {error}"
        left = self._reap_all()
        if left:
            reason += f"; processes that cannot be ended: {left}"
        self._finish({"status": status, "reason": reason, "left": left})
        signal.set_wakeup_fd(-1)
        return status

    def _finish(self, end: dict[str, Any]) -> None:
        try:
            self._spool.emit("run-end", end)
        except SpoolFull:  # raised once; the reserve has been given back for this very event
            self._spool.emit("run-end", end)
        self._spool.close()
        self._evidence.close()

    def _tell_start(self) -> None:
        identity = {
            "run_id": self.spec.run_id,
            "boot_id": processes.boot_id(),
            "pid": os.getpid(),
            "pgid": os.getpgrp(),
            "session": os.getsid(0),
            "start_ticks": processes.start_ticks(os.getpid()),
            "wall_time_s": time.time(),
        }
        text = json.dumps(identity, indent=1, sort_keys=True).encode()
        write_whole(self.folder / SUPERVISOR_NAME, text)
        facts = {"python": platform.python_version(), "machine": platform.machine()}
        self._spool.emit("run-start", {**identity, "job": self.spec.job, **facts})
        if self._on_started is not None:
            self._on_started()

    def _watch(self, wake: int) -> tuple[str, str]:
        self._engine = self._start_engine()
        period = self._period_s
        next_sample = time.monotonic() + period / 4  # an early first one: short runs have some
        while True:
            self._wait(wake, next_sample)
            self._obey_signals()
            self._pump(self._engine)
            if self._engine.reap():
                end = self._after_exit(self._engine)
                if end is not None:
                    return end
                self._attempt += 1
                self._engine = self._start_engine()
            now = time.monotonic()
            if now >= next_sample:
                data = self._engine.sampler.sample().to_data()
                self._spool.emit("sample", {"attempt": self._attempt, **data})
                self._evidence.look()
                next_sample = max(next_sample + period, now)
            self._keep_times(now)

    def _wait(self, wake: int, next_sample: float) -> None:
        """Sleep until a pipe, a signal or the next thing that is due."""
        assert self._engine is not None
        times = [next_sample, self._kill_at, self._deadline if self._stop is None else None]
        if self._restarts and self._stop is None and self._planned is None:
            times.append(self._began + self._restarts[0].at_s)
        until = min(time_ for time_ in times if time_ is not None)
        poller = select.poll()
        for fd in (wake, *self._engine.open_fds):
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, until - time.monotonic()) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            while os.read(wake, 4096):
                pass

    @property
    def _deadline(self) -> float:
        return self._began + self.spec.deadline_s

    def _obey_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number != signal.SIGCHLD:
                self._end("cancelled", f"{signal.Signals(number).name} to the supervisor")

    def _end(self, status: str, reason: str, *, look: bool = False) -> None:
        """Decide how the run ends, and ask the engine to go. The first decision stands.

        `look`: where the engine stands is told first.
        """
        if self._stop is None:
            self._stop = (status, reason)
            if look:
                self._tell_stacks(reason)
            self._ask(signal.SIGTERM)

    def _tell_stacks(self, reason: str) -> None:
        assert self._engine is not None
        text = capture(self._engine.pid, self.folder / stacks_name(self._attempt))
        message = f"{reason}; where it stands is in {stacks_name(self._attempt)}"
        self._spool.emit("log", {"attempt": self._attempt, "message": message, "stacks": text})

    def _ask(self, number: int) -> None:
        assert self._engine is not None
        processes.signal_group(self._engine.pid, number)
        self._kill_at = time.monotonic() + GRACE_S

    def _keep_times(self, now: float) -> None:
        """What is due: the deadline, a planned restart, the end of patience, too long a spool."""
        silent_s = self._silence.seconds()
        stall_s = self.spec.stall_s
        if stall_s is not None and silent_s >= stall_s and self._planned is None:
            self._end("hung", f"no sign of progress for {silent_s:.0f} s", look=True)
        if now >= self._deadline:
            reason = f"not done after {self.spec.deadline_s:g} s"
            self._end("deadline", reason, look=silent_s >= LOOK_S)
        if self._spool.size > EVENTS_LIMIT:
            self._end("failed", f"the engine said more than {EVENTS_LIMIT >> 20} MB of events")
        if self._kill_at is not None and now >= self._kill_at:
            assert self._engine is not None
            if self._kills == MAX_KILLS:
                raise RuntimeError(
                    f"engine {self._engine.pid} outlives SIGKILL: stuck in a driver?"
                )
            processes.signal_group(self._engine.pid, signal.SIGKILL)
            self._kills += 1
            self._kill_at = now + GRACE_S
        due = self._restarts and self._stop is None and self._planned is None
        if due and now >= self._began + self._restarts[0].at_s:
            restart = self._restarts.pop(0)
            self._planned = restart.reason
            self._ask(signal_number(restart.signal))

    def _start_engine(self) -> EngineProcess:
        log = CappedLog(self.folder / engine_log_name(self._attempt))
        spec = self.folder / SPEC_NAME
        engine = EngineProcess(
            lambda fd: self._command(spec, self.folder, fd, self._attempt), self.folder, log
        )
        self._spool.emit("engine-start", {"attempt": self._attempt, "pid": engine.pid})
        self._evidence.begin(engine.pid)
        self._silence.over()
        return engine

    def _pump(self, engine: EngineProcess) -> None:
        """Take what the engine has written so far into the spool and its log."""
        for line in engine.read_events():
            self._take(line)
        for size in engine.splitter.dropped:
            self._log(f"an event line of {size} bytes was dropped: over {engine.splitter.limit}")
        engine.splitter.dropped.clear()
        engine.read_output()

    def _take(self, line: bytes) -> None:
        try:
            t_ns, kind, data = parse_engine_line(line)
        except RecordError as error:
            self._log(f"an event line was dropped: {error}")
            return
        now = time.monotonic_ns()
        if t_ns is None or not self._began * 1e9 <= t_ns <= now:
            t_ns = now
        if kind == "error":
            self._last_error = f"{data.get('kind', 'error')}: {data.get('message', '')}"[:500]
        self._silence.over()
        self._spool.emit(kind, data, t_ns)

    def _log(self, message: str) -> None:
        self._spool.emit("log", {"attempt": self._attempt, "message": message})

    def _after_exit(self, engine: EngineProcess) -> tuple[str, str] | None:
        """Tell the exit; the run's (status, reason), or None when the engine is to start again."""
        processes.signal_group(engine.pid, signal.SIGKILL)  # what it started ends with it
        self._pump(engine)
        rest = engine.splitter.remainder()
        if rest:
            self._log(f"the engine ended within an event line; {len(rest)} bytes: {rest[:80]!r}")
        engine.close()
        planned, self._planned = self._planned, None
        self._kill_at, self._kills = None, 0
        data = {"attempt": self._attempt, "planned": planned is not None, **engine.exit_data()}
        if planned is not None:
            data["reason"] = planned
        elif self._stop is not None:
            # Not the engine's own end: whoever judges it must not look for somebody else.
            data["ended_by"] = "supervisor"
            data["reason"] = ": ".join(self._stop)
        kills = processes.oom_kills()
        if kills is not None and self._oom_kills is not None:
            data["oom_kills"] = kills - self._oom_kills  # of the whole board, since the run began
        if planned is None and data.get("code") != 0 and self._status() != "cancelled":
            self._spool.emit("evidence", lean(self._evidence.collect(self._attempt)))
        self._spool.emit("engine-exit", data)
        if self._stop is not None:
            return self._stop
        if planned is not None:
            return None
        if data.get("code") == 0:
            if self._restarts:
                self._log(f"{len(self._restarts)} planned restarts were not reached")
            return "finished", ""
        how = f"code {data['code']}" if "code" in data else f"{data['signal']}, not sent by us"
        if data.get("oom_kills"):
            how += f"; the kernel killed {data['oom_kills']} process(es) for memory meanwhile"
        return "failed", f"engine ended with {how}; {self._last_error}".rstrip("; ")

    def _status(self) -> str:
        """How the run ends, as far as that is decided."""
        return self._stop[0] if self._stop is not None else ""

    def _end_engine_now(self) -> None:
        if self._engine is not None and self._engine.status is None:
            processes.signal_group(self._engine.pid, signal.SIGKILL)

    def _reap_all(self) -> list[int]:
        """End and reap every process left below this one; those that resist are returned."""
        until = time.monotonic() + GONE_S
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = processes.descendants()
            if not left or time.monotonic() > until:
                return left
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def signal_number(name: str) -> int:
    """The number of a signal given by name. Raises RecordError for one that does not end a run."""
    if name not in ("SIGKILL", "SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV"):
        raise RecordError(f"restart signal {name!r}, expected SIGKILL, SIGTERM, SIGINT or SIGABRT")
    return int(signal.Signals[name])


def main(argv: Sequence[str] | None = None, *, command: WorkerCommand = engine_command) -> int:
    """Run a spec. Exit status 0 finished, 1 ended otherwise, 2 wrong use; detached: 0 started."""
    parser = argparse.ArgumentParser(prog="engine run", description=main.__doc__)
    parser.add_argument("spec", type=Path, help="the run's spec (JSON)")
    parser.add_argument("--spool", type=Path, required=True, help="a folder of this run's own")
    parser.add_argument("--detach", action="store_true", help="return once it runs; prints its pid")
    options = parser.parse_args(argv)
    folder: Path = options.spool.absolute()
    try:
        text = options.spec.read_text()
        spec = RunSpec.from_json(text)
        folder.mkdir(parents=True, exist_ok=True)
        if options.spec.absolute() != folder / SPEC_NAME:
            write_whole(folder / SPEC_NAME, text.encode())
        if options.detach:
            return _detach(spec, folder, command)
        return _exit_status(Supervisor(spec, folder, command=command).run())
    except (OSError, RecordError, SpoolError) as error:
        print(f"engine run: {error}", file=sys.stderr)
        return 2


def _exit_status(status: str) -> int:
    return 0 if status == "finished" else 1


def _detach(spec: RunSpec, folder: Path, command: WorkerCommand) -> int:
    """Start the supervisor in a session of its own; returns once it has told its start.

    Nothing of the caller stays open in it: neither the terminal nor the streams of an SSH channel,
    which would otherwise keep the caller's command from ending.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            if os.fork() == 0:  # never a session leader: it cannot gain a terminal
                os.setpgid(0, 0)
                status = _detached(spec, folder, command, tell)
            else:
                status = 0
        finally:
            os._exit(status)
    os.close(tell)
    os.waitpid(child, 0)
    message = b""
    until = time.monotonic() + DETACH_S
    while not message.endswith(b"\n"):
        ready, _, _ = select.select([told], [], [], max(0.0, until - time.monotonic()))
        chunk = os.read(told, 4096) if ready else b""
        if not chunk:
            break
        message += chunk
    os.close(told)
    if message.endswith(b"\n"):
        print(message.decode().strip(), flush=True)
        return 0
    log = folder / SUPERVISOR_LOG_NAME
    said = log.read_text(errors="replace").strip()[-2000:] if log.exists() else ""
    print(f"engine run: the supervisor did not start; {said or 'it said nothing'}", file=sys.stderr)
    return 1


def _detached(spec: RunSpec, folder: Path, command: WorkerCommand, tell: int) -> int:
    """The supervisor's own life after the forks."""
    processes.redirect_streams(folder / SUPERVISOR_LOG_NAME)
    tell = processes.close_inherited(keep=tell)
    os.chdir(folder)
    faulthandler.enable()

    def started() -> None:
        os.write(tell, f"{os.getpid()}\n".encode())
        os.close(tell)

    try:
        return _exit_status(Supervisor(spec, folder, command=command, on_started=started).run())
    except BaseException:
        traceback.print_exc()
        return 1
