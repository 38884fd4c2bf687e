"""`harness boards` why, health, quarantine, release, power: how a board is, and what helps it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.board_options import (
    DEVICES,
    FarmOption,
    JsonOption,
    NameArgument,
    NamesArgument,
    TagOption,
)
from harness.cli.output import emit, emit_json, guard, say, visible
from harness.errors import HarnessError

if TYPE_CHECKING:
    import datetime

    from harness.boards.power import PowerState, Supply
    from harness.boards.status import Ending, Happening, Status
    from harness.deadline import Deadline
    from harness.farm.results import CampaignResult
    from harness.inventory import Board
    from harness.store import Store

ACTIONS = ("on", "off", "cycle", "status")
POWER_S = 120.0


@guard
def why(name: NameArgument, farm: FarmOption = DEVICES, as_json: JsonOption = False) -> None:
    """Say who holds a board and until when, why it is set aside, what was done about it, how its
    last health check and its last runs ended.

    \b
    Examples
      harness boards why rk3588-01
      harness boards why rk3588-01 --json
    """
    from harness.boards.status import status_of

    status = status_of([_board(farm, name)])[0]
    if as_json:
        emit_json(status)
        return
    for line in _reasons(status):
        emit(visible(line))


@guard
def health(
    names: NamesArgument = None,
    farm: FarmOption = DEVICES,
    tag: TagOption = None,
    quarantined: Annotated[
        bool,
        typer.Option("--quarantined", help="Only boards that the harness itself set aside."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that boards answer and compute rightly, by a short golden run. A board in quarantine
    that passes is re-admitted.

    \b
    Examples
      harness boards health rk3588-01
      harness boards health --quarantined          before a nightly: who is well again?

    Exit codes: 0 all are well, 1 one computes wrongly, 2 one cannot be checked.
    """
    from harness.cli.summary import print_summary
    from harness.inventory import load_farm
    from harness.store import Store

    boards = load_farm(farm).select(names or (), tag or ())
    with Store.open() as store:
        if quarantined:
            boards = set_aside(store, boards)
            if not boards:
                if as_json:
                    emit_json({"boards": {}})
                else:
                    emit("no board is set aside")
                return
        result = check(boards, store)
    if as_json:
        emit_json(result.as_json())
    else:
        print_summary(result)
    raise typer.Exit(result.exit_code)


@guard
def quarantine(
    name: NameArgument,
    reason: Annotated[str, typer.Option(help="Why, for whoever wants the board next.")],
    farm: FarmOption = DEVICES,
    as_json: JsonOption = False,
) -> None:
    """Set a board aside: it takes part in nothing until it passes `harness boards health` or is
    released. A run that is on it goes on.

    \b
    Examples
      harness boards quarantine rk3588-01 --reason "its fan is loose"
    """
    from harness.boards.care import Care, this_person
    from harness.store import Store

    board = _board(farm, name)
    if not reason.strip():
        raise HarnessError("an empty --reason", expected="why the board is set aside")
    with Store.open() as store:
        found = Care(store).quarantine(board.name, reason.strip(), this_person())
    if as_json:
        emit_json({"board": board.name, "reason": found.reason, "by": found.by})
    else:
        emit(visible(f"{board.name} is {found}"))


@guard
def release(name: NameArgument, farm: FarmOption = DEVICES, as_json: JsonOption = False) -> None:
    """Re-admit a board that was set aside, without a check. Nothing happens to any other.

    \b
    Examples
      harness boards release rk3588-01
    """
    from harness.boards.care import Care, this_person
    from harness.store import Store

    board = _board(farm, name)
    with Store.open() as store:
        was = Care(store).release(board.name, f"by {this_person()}")
    if as_json:
        emit_json({"board": board.name, "released": was is not None})
    else:
        told = "was not in quarantine" if was is None else f"is re-admitted; it was {was}"
        emit(visible(f"{board.name} {told}"))


@guard
def power(
    name: NameArgument,
    action: Annotated[str, typer.Argument(metavar="on|off|cycle|status", help="What to do.")],
    farm: FarmOption = DEVICES,
    as_json: JsonOption = False,
) -> None:
    """Switch a board's power, or tell its state: on, off or unknown. Needs 'power' in devices.yaml.

    The board must be free: its lease is held while it is switched. What was switched is looked at
    afterwards; a supply that cannot tell its state is "unknown", which is no error.

    \b
    Examples
      harness boards power rk3588-01 status
      harness boards power rk3588-01 cycle
    """
    from harness.boards.power import Supply
    from harness.deadline import Deadline

    board = _board(farm, name)
    if action not in ACTIONS:
        raise HarnessError(f"no action {action!r}", expected="one of " + ", ".join(ACTIONS))
    supply = Supply(board)
    deadline = Deadline.after(POWER_S, f"power {action} of {name}")
    state = supply.status(deadline) if action == "status" else _switch(supply, action, deadline)
    if as_json:
        emit_json({"board": name, "action": action, "state": state.value})
        return
    emit(f"{name}: {state}")
    if action != "status" and state.value == "unknown":
        say("its supply took the order and cannot tell its state")


def _switch(supply: Supply, action: str, deadline: Deadline) -> PowerState:
    """With the board's lease held; in its journal, whatever comes of it."""
    from harness.boards.care import POWER, Care, this_person
    from harness.boards.leases import Leases, lease_guard
    from harness.store import Store

    name, person = supply.board.name, this_person()
    say(f"{name}: power {action}")
    with Store.open() as store, lease_guard(Leases(store), name, f"power {action} by {person}"):
        care = Care(store)
        try:
            state = {"on": supply.on, "off": supply.off, "cycle": supply.cycle}[action](deadline)
        except HarnessError as error:
            care.note(name, POWER, False, f"{action} by {person}: {error.found}")
            raise
        care.note(name, POWER, True, f"{action} by {person}: {state}")
        return state


def check(boards: Sequence[Board], store: Store) -> CampaignResult:
    """The health check on all of them. One that was set aside and passes is re-admitted."""
    from harness.cli.bringup import run
    from harness.deploy.models import prepare_tiny
    from harness.farm.runner import HEALTH_CHECK, Resume
    from harness.farm.selection import bringup_options
    from harness.jobs.health import HEALTH

    options = bringup_options()
    return run(
        boards,
        prepare_tiny(options.seed),
        options,
        [HEALTH],
        store,
        resume=Resume.NEVER,
        kind=HEALTH_CHECK,
    )


def set_aside(store: Store, boards: Sequence[Board]) -> list[Board]:
    """Those that the harness set aside, not those that a person did."""
    from harness.boards.care import Care

    care = Care(store)
    found = ((board, care.quarantined(board.name)) for board in boards)
    return [board for board, aside in found if aside is not None and aside.automatic]


def _board(farm: Path, name: str) -> Board:
    from harness.inventory import load_farm

    return load_farm(farm).select([name])[0]


def _reasons(status: Status) -> list[str]:
    if status.holder is None:
        lines = [f"{status.board} is free"]
    else:
        since = status.held_since and status.held_since.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        until = status.held_until and status.held_until.astimezone().strftime("%H:%M:%S")
        lines = [
            f"{status.board} is held by {status.holder}: {status.reason or 'no reason given'}",
            f"  since {since}, until {until} unless renewed",
        ]
    aside = status.quarantine
    if aside is not None:
        lines += [
            f"{status.board} is quarantined since {_when(aside.since)} by {aside.by}: "
            f"{aside.reason}",
            f"  `harness boards health {status.board}` re-admits it when it is well, "
            f"`harness boards release {status.board}` without a check",
        ]
    for run in status.left:
        again = "the same command with --resume" if run.stopped else "the same command"
        lines.append(
            f"a {run.stage} run ({run.run_id[:8]}) of a harness that ended may still be on it; "
            f"{again} continues it, another one ends it"
        )
    return [*lines, *_endings(status), *_happenings(status)]


def _endings(status: Status) -> list[str]:
    if status.last is None:
        return [] if status.left else ["no run of it is known here"]
    lines = [f"last run: {_sentence(status.last)}"]
    error = status.last_error
    if error is not None:
        lines.append(f"last trouble: {_sentence(error)}")
        # A run that found the board busy advises what is being asked right now.
        if error.remedy and "boards why" not in error.remedy:
            lines.append(f"  what to do: {error.remedy}")
    lines += [f"before: {_sentence(run)}" for run in status.earlier if run != error]
    return lines


def _happenings(status: Status) -> list[str]:
    lines = []
    if status.last_health is not None:
        lines.append(f"last health check: {_told(status.last_health)}")
    if status.journal:
        lines.append("what was done about it, the newest first:")
        lines += [f"  {item.kind}: {_told(item)}" for item in status.journal]
    return lines


def standing(status: Status) -> str:
    """Who holds the board, or that it is set aside, for a table."""
    aside = "" if status.quarantine is None else f"quarantined: {status.quarantine.reason}"
    return "; ".join(filter(None, (aside, status.holder))) or "free"


def brief(ending: Ending | None) -> str:
    """How a run ended, for a table."""
    return "" if ending is None else f"{ending.stage}: {ending.outcome}, {_when(ending.at)}"


def _sentence(ending: Ending) -> str:
    model = f" with {ending.model}" if ending.model else ""
    kind = f" ({ending.error_kind})" if ending.error_kind else ""
    when = _when(ending.at)
    return f"{ending.stage}{model} on {when}: {ending.outcome}{kind}, {ending.headline}"


def _told(item: Happening) -> str:
    return f"{_when(item.at)}, {'good' if item.good else 'bad'}, {item.told}"


def _when(at: datetime.datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M")
