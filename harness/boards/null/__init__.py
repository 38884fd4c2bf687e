"""Many boards that do next to nothing, in one process: how a farm of 200 feels to its host."""

from harness.boards.null.fleet import Counts, NullFleet, null_boards

__all__ = ["Counts", "NullFleet", "null_boards"]
