"""Power of a place in a labgrid lab."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.boards.labgrid import CLIENT, LabgridPlace
from harness.boards.power.base import PowerState
from harness.errors import BoardError

if TYPE_CHECKING:
    from harness.deadline import Deadline
    from harness.inventory import Board

STATES = {"is on": PowerState.ON, "is off": PowerState.OFF}


class LabgridPower:
    """Raises HarnessError where labgrid's client is not installed."""

    tells_status = True

    def __init__(self, board: Board) -> None:
        if board.power is None or board.power.place is None:
            raise ValueError(f"board {board.name} has no labgrid place")
        self.board, self.place = board, LabgridPlace(board.name, board.power.place)

    def on(self, deadline: Deadline) -> None:
        self._act("on", deadline)

    def off(self, deadline: Deadline) -> None:
        self._act("off", deadline)

    def cycle(self, deadline: Deadline) -> None:
        self._act("cycle", deadline)

    def status(self, deadline: Deadline) -> PowerState:
        with self.place.acquired(deadline):
            code, said = self.place.call(["power", "get"], deadline)
        if code != 0:
            return PowerState.UNKNOWN
        last = said.strip().splitlines()[-1] if said.strip() else ""
        return next((s for end, s in STATES.items() if last.endswith(end)), PowerState.UNKNOWN)

    def _act(self, action: str, deadline: Deadline) -> None:
        with self.place.acquired(deadline) as refused:
            code, said = self.place.call(["power", action], deadline)
        if code != 0:
            words = (refused or said).strip().splitlines()
            raise BoardError(
                self.board.name,
                "power",
                f"labgrid did not switch place {self.place.name} {action}: "
                f"{words[-1][:200] if words else 'it said nothing'}",
                expected="a place that is free, or acquired by this user",
                remedy=f"see `{CLIENT} -p {self.place.name} show`, and LG_COORDINATOR",
            )


DRIVER = LabgridPower
