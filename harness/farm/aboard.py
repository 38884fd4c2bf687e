"""What runs on a board, asked of the board itself: a measurement needs the board alone."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.deadline import Deadline
from harness.deploy.push import ask_board
from harness.errors import BoardError, HarnessError
from harness.farm.resume import abandon, is_leftover
from harness.jobs.lifecycle import RemoteRun

if TYPE_CHECKING:
    from harness.connect import BoardSession
    from harness.farm.placing import Placed
    from harness.store import RunRow, Store

ASK_S = 60.0  # Python's start on a slow card included


@dataclasses.dataclass(frozen=True)
class LiveRun:
    """A run that has living processes on a board."""

    run_id: str
    spool: str
    pids: tuple[int, ...]
    age_s: float | None  # since its oldest process began; None where the board could not tell

    def __str__(self) -> str:
        since = "an unknown time"
        if self.age_s is not None:
            began = datetime.datetime.now().astimezone() - datetime.timedelta(seconds=self.age_s)
            since = f"{began:%Y-%m-%d %H:%M:%S}"  # the host's clock: the board's may be wrong
        numbers = ", ".join(map(str, self.pids))
        return f"run {self.run_id} since {since} (process {numbers})"


def live_runs(session: BoardSession, placed: Placed) -> list[LiveRun]:
    """The runs alive in every work folder that this user may have on the board, in one round trip.

    Raises BoardError.
    """
    roots = [placed.deployment.root, *(item.path for item in placed.facts.usable_folders)]
    request = {"do": "runs", "roots": list(dict.fromkeys(roots))}
    deadline = Deadline.after(ASK_S, "asking what runs on the board")
    answer = ask_board(session, placed.deployment.python, request, deadline)
    return [
        LiveRun(item["run_id"], item["spool"], tuple(item["pids"]), item["age_s"])
        for item in answer["runs"]
    ]


def make_room(
    session: BoardSession,
    placed: Placed,
    store: Store,
    clean_up: Callable[[RemoteRun], None],
    *,
    campaign_id: str | None = None,
    keep: str | None = None,
) -> None:
    """Ends what earlier runs of ours left alive on the board, all but run `keep`.

    The caller holds the board's lease. `clean_up` ends a run and removes its spool as far as it
    can; `campaign_id` is the caller's own. Raises BoardError "busy" when something lives on, or is
    not ours to end: nothing may be measured beside it.
    """
    live = [run for run in live_runs(session, placed) if run.run_id != keep]
    ended = False
    for run in live:
        row = _row(store, run.run_id)
        if row is None:
            ours = run.run_id.startswith(runs_of_tests(store))
        else:
            ours = is_leftover(store, row, campaign_id)
        if not ours:
            continue
        clean_up(RemoteRun(run.run_id, run.spool, placed.deployment))
        if row is not None and row.state != "judged":
            abandon(store, row.id)
        ended = True
    if ended:
        live = [run for run in live_runs(session, placed) if run.run_id != keep]
    if live:
        raise BoardError(
            session.board.name,
            "busy",
            f"{'; '.join(map(str, live))} is alive on the board",
            expected="a board on which nothing else is measured",
            remedy="wait for its end, or end its processes on the board; where not even SIGKILL "
            "ends them, restart the board",
        )


def runs_of_tests(store: Store) -> str:
    """What the ids of runs begin with that a test started: these are in no store.

    The same for all who share this store's leases: whoever holds a board may end such runs on it,
    since the one who started them held it before.
    """
    database = store.database
    place = socket.gethostname() if database.is_sqlite else ""
    return f"test-{hashlib.sha256(f'{place} {database.label}'.encode()).hexdigest()[:8]}-"


def _row(store: Store, run_id: str) -> RunRow | None:
    """The store's record of a run, None for a run of somebody else."""
    try:
        return store.run(run_id)
    except HarnessError:
        return None
