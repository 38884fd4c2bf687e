"""What else finds a set of steps that fails by chance: each with the same rule for repeats.

A configuration is tried up to `repeats` times and counts as failing with the first failure.
`Spent` is raised when the budget is; then nothing is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.planted.worlds import World


class Spent(Exception):
    """The budget of runs is spent."""


class Repeated:
    """Tries configurations of a world within a budget of runs."""

    def __init__(self, world: World, repeats: int, budget: int) -> None:
        self.world, self.repeats, self.budget = world, repeats, budget

    def fails(self, on: Sequence[str]) -> bool:
        chosen = frozenset(on)
        for _ in range(self.repeats):
            if self.world.runs >= self.budget:
                raise Spent
            if self.world.fails(chosen):
                return True
        return False


def linear(tried: Repeated) -> frozenset[str]:
    """One step more each time, until it fails: the last one."""
    steps = tried.world.steps
    for count in range(1, len(steps) + 1):
        if tried.fails(steps[:count]):
            return frozenset({steps[count - 1]})
    return frozenset()


def git_bisect(tried: Repeated) -> frozenset[str]:
    """Halves of the prefix, the first failing one: `git bisect run` with repeats."""
    steps = tried.world.steps
    good, bad = 0, len(steps)
    while bad - good > 1:
        middle = (good + bad) // 2
        if tried.fails(steps[:middle]):
            bad = middle
        else:
            good = middle
    return frozenset({steps[bad - 1]})


def ddmin(tried: Repeated) -> frozenset[str]:
    """Zeller and Hildebrandt 2002: a set that fails, of which no single part can be left out."""
    failing, parts = list(tried.world.steps), 2
    while len(failing) >= 2:
        size = -(-len(failing) // parts)
        pieces = [failing[at : at + size] for at in range(0, len(failing), size)]
        for piece in pieces:
            if len(piece) < len(failing) and tried.fails(piece):
                failing, parts = piece, 2
                break
        else:
            for piece in pieces:
                rest = [step for step in failing if step not in piece]
                if parts > 2 and rest and tried.fails(rest):
                    failing, parts = rest, max(parts - 1, 2)
                    break
            else:
                if parts >= len(failing):
                    break
                parts = min(len(failing), 2 * parts)
    return frozenset(failing)


def go_bisect(tried: Repeated) -> frozenset[str]:
    """Go's `bisect` (golang.org/x/tools/cmd/bisect): halves, and where both are needed, each in
    turn with the other one on."""

    def search(steps: list[str], forced: list[str]) -> list[str]:
        if len(steps) == 1:
            return steps
        middle = len(steps) // 2
        left, right = steps[:middle], steps[middle:]
        if tried.fails(forced + left):
            return search(left, forced)
        if tried.fails(forced + right):
            return search(right, forced)
        found = search(left, forced + right)
        return found + search(right, forced + found)

    return frozenset(search(list(tried.world.steps), []))


BASELINES: dict[str, Callable[[Repeated], frozenset[str]]] = {
    "linear": linear,
    "git bisect": git_bisect,
    "ddmin": ddmin,
    "Go's bisect": go_bisect,
}
