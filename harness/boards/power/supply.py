"""One board's supply: its driver, and the rule that what was switched is looked at afterwards."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.boards.power.base import Cycling, PowerDriver, PowerState
from harness.deadline import Deadline
from harness.errors import BoardError, HarnessError

if TYPE_CHECKING:
    from harness.inventory import Board

ACTION_S = 30.0  # for one answer of a relay
SETTLE_S = 5.0  # until a relay that switched also says so
POLL_S = 0.2
OFF_S = 2.0  # without current, so that capacitors are empty: labgrid's own default
TRIES = 2  # a relay that timed out may have switched, or not: on and off can be asked again


class Supply:
    """Raises HarnessError where devices.yaml names no driver for the board."""

    def __init__(self, board: Board, *, off_s: float = OFF_S, settle_s: float = SETTLE_S) -> None:
        if board.power is None:
            raise HarnessError(
                "nothing switches its power",
                where=f"board {board.name}",
                expected="a key 'power' in devices.yaml",
                remedy="see 'power' in docs/devices.md, or switch it by hand",
            )
        package = __name__.rpartition(".")[0]
        module = importlib.import_module(f"{package}.{board.power.driver}")
        make: Callable[[Board], PowerDriver] = module.DRIVER
        self.board, self.driver = board, make(board)
        self._off_s, self._settle_s = off_s, settle_s

    def status(self, deadline: Deadline) -> PowerState:
        return self.driver.status(deadline.within(ACTION_S, "the status of the supply"))

    def on(self, deadline: Deadline) -> PowerState:
        """Switches it on. UNKNOWN: the relay took the order, and cannot tell its state.

        Raises BoardError "power" when the relay refuses, or says afterwards that it is off.
        """
        return self._set(PowerState.ON, self.driver.on, deadline)

    def off(self, deadline: Deadline) -> PowerState:
        """As `on`."""
        return self._set(PowerState.OFF, self.driver.off, deadline)

    def cycle(self, deadline: Deadline) -> PowerState:
        """Off and on again, by the relay's own way where it has one; as `on`."""
        if isinstance(self.driver, Cycling):
            return self._set(PowerState.ON, self.driver.cycle, deadline)
        self.off(deadline)
        _wait(deadline.within(self._off_s))
        return self.on(deadline)

    def _set(
        self, wanted: PowerState, act: Callable[[Deadline], None], deadline: Deadline
    ) -> PowerState:
        error: BoardError | None = None
        state = PowerState.UNKNOWN
        for _ in range(TRIES):
            if deadline.expired:
                break
            error = None
            try:
                act(deadline.within(ACTION_S, f"switching {wanted}"))
            except BoardError as refused:
                error = refused
            state = self._settled(wanted, deadline)
            if state is wanted or (state is PowerState.UNKNOWN and error is None):
                return state
        raise error or BoardError(
            self.board.name,
            "power",
            f"it was switched {wanted}, and its supply says {state}"
            if not deadline.expired
            else f"it was not switched {wanted} in time ({deadline.label})",
            expected=f"a supply that is {wanted}",
            remedy="look at the relay, and at 'power' in devices.yaml",
        )

    def _settled(self, wanted: PowerState, deadline: Deadline) -> PowerState:
        """The state once it is the wanted one, or the last that was told in time."""
        until = deadline.within(self._settle_s)
        while True:
            state = self.status(deadline)
            if state is wanted or until.expired or not self.driver.tells_status:
                return state
            _wait(until.within(POLL_S))


def _wait(until: Deadline) -> None:
    while not until.expired:
        time.sleep(min(0.1, until.remaining))
