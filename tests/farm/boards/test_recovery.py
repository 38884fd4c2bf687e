"""Switching virtual boards, and bringing one back rung by rung."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.boards import recovery, virtual
from harness.boards.care import POWER, REBOOT, Care
from harness.boards.power import PowerState, Supply
from harness.boards.virtual import namespace
from harness.boards.virtual.processes import start_of
from harness.connect import open_session
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board
from harness.store import Store


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture
def switched(home: Path) -> Callable[..., Board]:
    """A virtual board with a fake supply."""
    del home
    if not namespace.supported():
        pytest.skip("needs mount namespaces for this user")

    def make(options: dict[str, Any] | None = None, **keys: Any) -> Board:
        entry = {"power": {"driver": "fake"}, "boot_seconds": 10, **keys}
        return Board.model_validate({"name": "virt", "virtual": options or {}, **entry})

    return make


@pytest.fixture
def store(home: Path) -> Any:
    with Store.open(home / "results.sqlite") as opened:
        yield opened


def boot_id(board: Board) -> str:
    with open_session(board, deadline=soon()) as session:
        return recovery.boot_id_of(session, soon())


def climb(board: Board, store: Store, before: str | None) -> list[str]:
    return recovery.bring_back(
        board, Care(store), boot_id=before, tell=lambda _: None, check=lambda: None
    )


def test_a_board_that_is_switched_off_stays_off_for_everybody(
    switched: Callable[..., Board],
) -> None:
    board = switched()
    supply, before = Supply(board, off_s=0), boot_id(board)
    assert supply.status(soon()) is PowerState.ON
    assert supply.off(soon()) is PowerState.OFF
    assert virtual.running() == []
    with pytest.raises(BoardError, match="switched off") as caught:
        open_session(board, deadline=soon())
    assert (caught.value.kind, supply.status(soon())) == ("unreachable", PowerState.OFF)
    assert supply.on(soon()) is PowerState.ON
    assert boot_id(board) not in ("", before)


def test_a_cycle_ends_what_ran_on_the_board(switched: Callable[..., Board]) -> None:
    board = switched()
    with open_session(board, deadline=soon()) as session:
        told = session.run("sleep 600 >/dev/null 2>&1 & echo $!", deadline=soon(), check=True)
    pid = int(told.stdout)
    assert start_of(pid) is not None
    assert Supply(board, off_s=0).cycle(soon()) is PowerState.ON
    assert start_of(pid) is None


def test_a_soft_reboot_comes_first_and_is_enough_where_the_boot_id_changes(
    switched: Callable[..., Board], store: Store, home: Path
) -> None:
    state = home / "boards" / "virt" / "state.json"
    # What `reboot` is to a real board: the virtual one's init reboots when it is signalled.
    reboot = f"kill -USR1 $(sed -n 's/.*\"pid\": \\([0-9]*\\),.*/\\1/p' {state})"
    board = switched({"reboot_at": 3600}, reboot=reboot)
    before = boot_id(board)
    assert climb(board, store, before) == []
    assert boot_id(board) != before
    (event,) = Care(store).events("virt")
    assert (event.kind, event.good) == (REBOOT, True)
    assert f"after {before}" in event.told


def test_a_board_that_answers_without_having_booted_is_not_back(
    switched: Callable[..., Board], store: Store
) -> None:
    board = switched(reboot="true", boot_seconds=1)
    before = boot_id(board)
    assert climb(board, store, before) == []
    power, soft = Care(store).events("virt")
    assert (soft.kind, soft.good, power.kind, power.good) == (REBOOT, False, POWER, True)
    assert f"its boot_id is still {before}" in soft.told


def test_what_was_tried_on_a_board_that_stays_dead_is_told(
    switched: Callable[..., Board], store: Store
) -> None:
    board = switched({"refuse": "always"}, reboot="reboot", boot_seconds=1)
    tried = climb(board, store, "a-b-c")
    assert [text.partition(":")[0] for text in tried] == ["soft reboot", "power cycle, supply on"]
    assert "no answer within 1 s" in tried[1]
    assert [event.good for event in Care(store).events("virt")] == [False, False]


def test_a_board_that_nothing_restarts_is_told_so(home: Path, store: Store) -> None:
    del home
    (told,) = climb(Board.model_validate({"name": "v", "virtual": {}}), store, None)
    assert "neither 'power' nor 'reboot'" in told


def test_waiting_for_a_boot_ends_when_the_user_stops(
    switched: Callable[..., Board], store: Store
) -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    board = switched({"refuse": "always"}, boot_seconds=600)
    with pytest.raises(Stopped):
        recovery.wait_for_boot(board, "a-b-c", soon(600), stop)
