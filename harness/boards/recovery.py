"""Bringing back a board that does not answer, or that keeps what must be gone: rung by rung.

A soft reboot, where devices.yaml allows one, then a power cycle, where something switches the
board's power; after each, wait for a *changed* boot_id. Whoever calls this holds the board's lease.
Every rung is written to the board's journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.boards.care import POWER, REBOOT, Care
from harness.boards.power import Supply
from harness.connect import BoardSession, open_session
from harness.connect.dial import Limits
from harness.deadline import Deadline
from harness.errors import BoardError, HarnessError

if TYPE_CHECKING:
    from harness.inventory import Board

ANSWER_S = 30.0  # for a connection and one short command
POWER_S = 120.0
PAUSE_S = 1.0
LASTING = ("host-key", "auth")  # no waiting mends these
_ONE_TRY = Limits(attempts=1)

Tell = Callable[[str], None]
Check = Callable[[], None]


def has_rungs(board: Board) -> bool:
    """Whether anything can be tried on the board."""
    return board.reboot is not None or board.power is not None


def boot_id_of(session: BoardSession, deadline: Deadline) -> str:
    """The board's boot_id now, "" where it tells none. Raises BoardError."""
    path = "/proc/sys/kernel/random/boot_id"
    answer = session.run(f"cat {path} 2>/dev/null || true", deadline=deadline)
    return answer.stdout.decode(errors="replace").strip()[:64]


def answers(board: Board) -> bool:
    """Whether the board runs a command now."""
    try:
        _ask_boot_id(board, Deadline.after(ANSWER_S, f"looking at {board.name}"))
    except BoardError:
        return False
    return True


def bring_back(
    board: Board, care: Care, *, boot_id: str | None, tell: Tell, check: Check
) -> list[str]:
    """Climbs the rungs until the board answers after a boot. `boot_id` is that of before.

    Returns nothing when it is back, else what was tried, a sentence each. `check` may raise to
    stop; it is called while something is waited for.
    """
    tried = []
    if board.reboot is not None:
        told = _rung(board, care, REBOOT, "soft reboot", _soft_reboot, boot_id, tell, check)
        if told is None:
            return []
        tried.append(told)
    if board.power is not None:
        told = _rung(board, care, POWER, "power cycle", _power_cycle, boot_id, tell, check)
        if told is None:
            return []
        tried.append(told)
    return tried or ["nothing restarts it: devices.yaml has neither 'power' nor 'reboot' for it"]


def _rung(
    board: Board,
    care: Care,
    kind: str,
    name: str,
    act: Callable[[Board], str],
    boot_id: str | None,
    tell: Tell,
    check: Check,
) -> str | None:
    """None when the board is back after it, else what happened."""
    check()
    tell(name)
    begun = time.monotonic()
    good = False
    try:
        done = act(board)
        tell(f"waiting for it to boot after a {name}")
        good, seen = wait_for_boot(
            board, boot_id, Deadline.after(board.boot_seconds, f"boot of {board.name}"), check
        )
        told = f"{name}{done}: {seen}"
    except HarnessError as error:
        told = f"{name}: {error.found}"
    care.note(board.name, kind, good, f"{told} ({time.monotonic() - begun:.0f} s)")
    return None if good else told


def _soft_reboot(board: Board) -> str:
    if board.reboot is None:
        raise ValueError(f"board {board.name} is not asked to reboot")
    deadline = Deadline.after(ANSWER_S, "asking it to reboot")
    try:
        with open_session(board, deadline=deadline, limits=_ONE_TRY) as session:
            result = session.run(board.reboot, deadline=deadline)
    except BoardError as error:
        if error.kind == "board-lost":  # it does what it was asked
            return ""
        raise
    if result.status != 0:
        said = result.stderr.decode(errors="replace").strip()[-200:] or "it said nothing"
        raise BoardError(board.name, "power", f"'reboot' ended with status {result.status}: {said}")
    return ""


def _power_cycle(board: Board) -> str:
    state = Supply(board).cycle(Deadline.after(POWER_S, "a power cycle"))
    return f", supply {state}"


def wait_for_boot(
    board: Board, boot_id: str | None, deadline: Deadline, check: Check
) -> tuple[bool, str]:
    """(True, how it is known) once the board answers with another boot_id than `boot_id`; with any
    where None is known. (False, why not) at the deadline, or when no waiting will help."""
    seen = "no answer"
    while not deadline.expired:
        check()
        try:
            now = _ask_boot_id(board, deadline.within(ANSWER_S))
        except BoardError as error:
            if error.kind in LASTING:
                return False, error.found
            seen = f"no answer within {board.boot_seconds:.0f} s ({error.found})"
        else:
            if not boot_id:
                return True, "it answers; what its boot_id was is not known"
            if now != boot_id:
                return True, f"it answers, boot_id {now or 'not told'} after {boot_id}"
            seen = f"it answers, and has not booted: its boot_id is still {boot_id}"
        _pause(deadline.within(PAUSE_S), check)
    return False, seen


def _ask_boot_id(board: Board, deadline: Deadline) -> str:
    with open_session(board, deadline=deadline, limits=_ONE_TRY) as session:
        return boot_id_of(session, deadline)


def _pause(until: Deadline, check: Check) -> None:
    while not until.expired:
        check()
        time.sleep(min(0.1, until.remaining))
