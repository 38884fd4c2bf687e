"""What switches a board's supply. A driver is a module of this folder with a `DRIVER`."""

from harness.boards.power.base import Cycling, PowerDriver, PowerState
from harness.boards.power.supply import Supply

__all__ = ["Cycling", "PowerDriver", "PowerState", "Supply"]
