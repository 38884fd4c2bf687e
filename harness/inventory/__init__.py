"""The farm as `devices.yaml` describes it: boards, how to reach them, what they must reach."""

from harness.inventory.engine import Engine
from harness.inventory.farm import Farm, load_farm
from harness.inventory.schema import Board, Budget, Jump, Power, Toolchain, Virtual

__all__ = [
    "Board",
    "Budget",
    "Engine",
    "Farm",
    "Jump",
    "Power",
    "Toolchain",
    "Virtual",
    "load_farm",
]
