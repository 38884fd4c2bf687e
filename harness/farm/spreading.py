"""How device tests are spread over the workers of pytest-xdist: a board stays with one of them.

Test ids stay as they are, so that `--lf`, `-k` and a report mean the same with workers and without;
`--dist=loadgroup` would add the board to each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xdist.scheduler import LoadScopeScheduling


def board_in(nodeid: str, boards: Iterable[str]) -> str | None:
    """The board that a test's id names among its parameters: the first of them, else any.

    >>> board_in("test_own.py::test_mine[rk-1-fast]", ["rk", "rk-1"])
    'rk-1'
    """
    head, bracket, inside = nodeid.partition("@")[0].rpartition("[")
    if not bracket or not head or not inside.endswith("]"):
        return None
    inside = f"-{inside[:-1]}-"
    names = sorted(boards, key=len, reverse=True)  # a longer name may begin with a shorter one
    first = next((name for name in names if inside.startswith(f"-{name}-")), None)
    return first or next((name for name in names if f"-{name}-" in inside), None)


class BoardScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no type information
    """All tests of one board are a unit of work, as is every test without a board.

    A worker that dies takes one test along: the one that it was running. The schedulers by scope of
    xdist 3.8 start that test again, which ends the next worker too, and leave the worker that takes
    over waiting for more work when a single test is left.
    """

    def __init__(self, config: Any, log: Any, boards: Iterable[str]) -> None:
        super().__init__(config, log)
        self._boards = tuple(boards)

    def _split_scope(self, nodeid: str) -> str:
        return board_in(nodeid, self._boards) or nodeid

    def remove_node(self, node: Any) -> str | None:
        """The test that was running when the worker died; None when none was."""
        units: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        crashed: str | None = None
        for unit in units.values():
            for nodeid, completed in unit.items():
                if crashed is None and not completed:
                    crashed, unit[nodeid] = nodeid, True
        self.workqueue.update(
            {scope: unit for scope, unit in units.items() if not all(unit.values())}
        )
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:
            return  # it has just been started, and is asked again when it knows the tests
        super()._reschedule(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()  # it runs what it has: a worker keeps its last test until it is told
