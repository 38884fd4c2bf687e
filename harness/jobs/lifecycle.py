"""A run on a board, from the host: start it, find it again, follow it, cancel it, clean up.

The run belongs to the board's supervisor. A link that drops, or a harness that is killed, changes
nothing about it: `find` and `follow` go on from the byte where the host's copy of the spool ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.records import Event, RunSpec
from engine.spool import (
    EVENTS_NAME,
    SPEC_NAME,
    SUPERVISOR_NAME,
)
from harness.deadline import Deadline
from harness.deploy.push import Deployment, ask_board
from harness.errors import BoardError
from harness.jobs.following import Follower
from harness.jobs.runlog import RunLog

if TYPE_CHECKING:
    from harness.connect import BoardSession

__all__ = ["RemoteRun", "RunLog", "cancel", "clean_up", "find", "follow", "start"]

POLL_S = 30.0  # for one short answer
START_S = 60.0  # Python's start on a slow card, included
RECONNECT_S = 120.0  # a board that restarts is back by then
CANCEL_S = 15.0
ANSWER_BYTES = 1 << 20  # of one short answer, with what start files print around it

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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
    made = session.run(look, deadline=deadline, limit_bytes=ANSWER_BYTES)
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
        script,
        deadline=deadline.within(START_S),
        limit_bytes=ANSWER_BYTES,
        title="starting the engine",
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
    deadline = Deadline.after(POLL_S, "finding a run")
    result = session.run(["test", "-f", path], deadline=deadline, limit_bytes=ANSWER_BYTES)
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
    reconnect_s: float = RECONNECT_S,
) -> RunLog:
    """Copy the run's spool into `folder` until it ends, over as many connections as it takes.

    `open_session` gives a live session: the one in use as long as it lives. It is called on a
    thread of its own, so that neither patience nor `cancel` waits for a connection that does not
    come about. `on_event` is told every event once, those already in `folder` first. When
    `deadline` passes or `cancel` answers True, the run is cancelled on the board and collected to
    its end.

    Raises BoardError: "protocol" when the board sends what is not the next event of this run;
    "board-lost" when it cannot be reached or answers nothing of use for `reconnect_s`, or at the
    last try after `cancel`: the run may go on there; "timeout" when a cancelled run goes on. A
    board that was reset, a supervisor that was killed, and a run that something else than this
    harness ended are ends of the run: the log's status is "board-reset" or "lost" and its reason
    holds the evidence.
    """
    return Follower(open_session, run, folder, on_event, deadline, cancel, reconnect_s).follow()
