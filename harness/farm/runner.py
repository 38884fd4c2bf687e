"""Bring-up in this process: stages on several boards, resumed where a killed harness stopped."""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.boards.leases import Leases, lease_guard
from harness.credentials import without_credentials
from harness.errors import HarnessError
from harness.farm.campaign import Campaign, Orders
from harness.farm.faults import require_ops
from harness.farm.placing import record_model
from harness.farm.progress import Reporter
from harness.farm.results import CampaignResult
from harness.farm.resume import mark_stopped, was_stopped
from harness.farm.selection import check_context
from harness.store import Store, options_hash
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.jobs.base import BringupOptions, Stage


HEALTH_CHECK = "health"  # the kind of a campaign that re-admits boards


class Resume(enum.Enum):
    """Which earlier campaign with the same boards, model and options is continued."""

    CRASHED = "crashed"  # one whose harness was killed, not one that the user stopped
    ALSO_STOPPED = "also-stopped"
    NEVER = "never"


def bringup(
    boards: Sequence[Board],
    model: PreparedModel,
    options: BringupOptions,
    store: Store,
    reporter: Reporter,
    *,
    stop: threading.Event,
    stages: Sequence[Stage] | None = None,
    resume: Resume = Resume.CRASHED,
    kind: str = "bringup",
) -> CampaignResult:
    """Runs `stages` (all, in order) on every board side by side, and waits for the end.

    Each board stops at its first stage that does not pass; its later stages are BLOCKED. Trouble
    with one board is an ERROR of that board. When `stop` is set, runs on boards are cancelled,
    boards cleaned and released. Virtual boards that this process started are stopped at the end.
    Raises HarnessError only for what concerns all boards: the store, the model.
    """
    campaign = open_campaign(
        boards, model, options, store, reporter, stop=stop, stages=stages, resume=resume, kind=kind
    )
    reporter.begin(list(campaign.boards), [stage.name for stage in campaign.orders.stages])
    try:
        campaign.start()
        campaign.wait()
    finally:
        reporter.end()
        if stop.is_set():  # a second Ctrl-C leaves before `finish`
            mark_stopped(store, campaign.orders.campaign_id)
        stop_virtual_boards(store, campaign.boards.values(), of_predecessor=campaign.orders.resumed)
    return campaign.finish()


def open_campaign(
    boards: Sequence[Board],
    model: PreparedModel,
    options: BringupOptions,
    store: Store,
    reporter: Reporter,
    *,
    stop: threading.Event,
    stages: Sequence[Stage] | None = None,
    resume: Resume = Resume.CRASHED,
    kind: str = "bringup",
) -> Campaign:
    """A campaign that has not started any board: a new one, or the one to be continued."""
    from harness.jobs import stages as all_stages

    check_context(model, options)
    if kind != HEALTH_CHECK:  # which runs a model of its own, without faults in what that lacks
        require_ops(boards, model)
    chosen = tuple(all_stages() if stages is None else stages)
    record_model(store, model)
    described = _describe(boards, model, options, chosen)
    earlier = _earlier(store, kind, options_hash(described), resume)
    campaign_id = earlier or store.begin_campaign(kind, _command(), described)
    if earlier is not None:
        mark_stopped(store, earlier, False)
        reporter.note("continuing the interrupted bring-up of the same boards, model and options")
    orders = Orders(
        campaign_id,
        model,
        options,
        chosen,
        resumed=earlier is not None,
        admits=kind == HEALTH_CHECK,
    )
    return Campaign(boards, orders, store, reporter, stop)


def _command() -> list[str]:
    """This process's command as people type it, without the folders of the program."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return [name, *(without_credentials(word) for word in sys.argv[1:])]


def _describe(
    boards: Sequence[Board],
    model: PreparedModel,
    options: BringupOptions,
    stages: Sequence[Stage],
) -> dict[str, Any]:
    """What makes two campaigns the same, so that the second continues the first."""
    return {
        "boards": sorted(
            (board.model_dump(mode="json") for board in boards), key=lambda entry: entry["name"]
        ),
        "model": model.sha256,
        "options": options.model_dump(mode="json"),
        "stages": [stage.name for stage in stages],
    }


def _earlier(store: Store, kind: str, wanted: str, resume: Resume) -> str | None:
    """The newest campaign left open, if it may be continued. All others are closed for good."""
    newest = store.interrupted_campaign(kind, wanted)  # from now on it belongs to this process
    if newest is None:
        return None
    while (older := store.interrupted_campaign(kind, wanted)) is not None:
        store.finish_campaign(older, Outcome.INVALID)
    if resume is Resume.ALSO_STOPPED or (
        resume is Resume.CRASHED and not was_stopped(store, newest)
    ):
        return newest
    store.finish_campaign(newest, Outcome.INVALID)
    return None


def stop_virtual_boards(
    store: Store, boards: Iterable[Board], *, of_predecessor: bool = False
) -> None:
    """Stops those of `boards` that are virtual and that this process started, or a killed one whose
    campaign it went on with.

    Each only while its lease is held: somebody else may be using it by now, and then it stays. It
    ends by itself when nobody has used it for a while.
    """
    ours = [board for board in boards if board.virtual is not None]
    if not ours:
        return
    from harness.boards import virtual

    started = virtual.started_here()
    leases = Leases(store)
    for board in ours:
        if board.name in started or of_predecessor:
            with (
                contextlib.suppress(HarnessError),  # busy, or it does not end
                lease_guard(leases, board.name, "ending the virtual board"),
            ):
                virtual.stop(board)
