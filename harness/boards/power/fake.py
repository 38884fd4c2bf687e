"""The power of a virtual board: off ends its server and all that runs on it, on starts it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.boards import virtual
from harness.boards.power.base import PowerState

if TYPE_CHECKING:
    from harness.deadline import Deadline
    from harness.inventory import Board


class FakePower:
    """A board that is switched off stays so for every process, until it is switched on."""

    tells_status = True

    def __init__(self, board: Board) -> None:
        self.board = board

    def on(self, deadline: Deadline) -> None:
        virtual.switch_on(self.board, deadline=deadline)

    def off(self, deadline: Deadline) -> None:
        virtual.switch_off(self.board, deadline=deadline)

    def status(self, deadline: Deadline) -> PowerState:
        del deadline
        return PowerState.OFF if virtual.is_switched_off(self.board) else PowerState.ON


DRIVER = FakePower
