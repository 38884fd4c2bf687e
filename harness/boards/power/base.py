"""The protocol of power drivers."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from harness.deadline import Deadline


class PowerState(StrEnum):
    """What a relay tells. UNKNOWN: it does not answer, or says something else."""

    ON = "on"
    OFF = "off"
    UNKNOWN = "unknown"


class PowerDriver(Protocol):
    """Made from a board whose entry names it: `DRIVER(board)`.

    A driver only asks its relay; whether that came true is looked at by `Supply`. `on` and `off`
    raise BoardError "power" when the relay refuses, and may be repeated.
    """

    tells_status: bool  # False: `status` is always UNKNOWN, so nobody needs to wait for it

    def on(self, deadline: Deadline) -> None: ...

    def off(self, deadline: Deadline) -> None: ...

    def status(self, deadline: Deadline) -> PowerState:
        """Raises nothing for a relay that does not answer: that is UNKNOWN."""
        ...


@runtime_checkable
class Cycling(Protocol):
    """Optional: the relay has an own way to switch off and on again."""

    def cycle(self, deadline: Deadline) -> None: ...
