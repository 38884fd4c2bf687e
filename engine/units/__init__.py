"""Units execute ops. They are found by file name: adding one is adding a module here."""

from engine.units.base import Unit
from engine.units.loading import load_unit, unit_names

__all__ = ["Unit", "load_unit", "unit_names"]
