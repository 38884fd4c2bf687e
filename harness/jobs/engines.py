"""How the engine runs on one board: what was asked for, what the board allows, what it measured.

The command line goes before the board's own entry, that before the unit's defaults. Threads and
cores that are left open are the board's own measurement (the ladder job), where there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine.options import EngineOptions
from harness.inventory.engine import AUTO, Engine

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.inventory import Board

NATIVE, NUMPY = "native", "packed"


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a board was measured to run best with."""

    threads: int
    cpus: tuple[int, ...] | None  # None: all that are allowed
    kv_layout: str | None = None
    huge_pages: bool | None = None


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """What a run on the board is given. `note` tells what was asked for and is not so."""

    options: EngineOptions
    pin: tuple[int, ...] | None = None
    note: str = ""


def layout_of(unit: str) -> str:
    """The layout of weights that a unit reads fastest."""
    return "interleaved" if unit == NATIVE else "blocked"


def likely_layout(boards: Iterable[Board], asked: Engine) -> str:
    """The layout to pack a model in before it is known what the boards can run: that of most."""
    native = [wants_native(board, asked) for board in boards]
    return layout_of(NATIVE if 2 * sum(native) >= len(native) else NUMPY)


def asked_of(board: Board, asked: Engine) -> Engine:
    """The command line's words over those of the board's entry."""
    return asked.over(board.engine)


def wants_native(board: Board, asked: Engine) -> bool:
    """Whether native code is to be built for the board."""
    return asked_of(board, asked).unit in (AUTO, NATIVE)


def may_fall_back(board: Board, asked: Engine) -> bool:
    """Whether numpy will do where native code cannot be built: nobody asked for more than a number
    of threads."""
    return not set(asked_of(board, asked).asked) - {"threads"}


def choose_engine(
    board: Board,
    facts: Facts,
    asked: Engine,
    *,
    why_not_native: str | None = None,
    tuned: Tuned | None = None,
) -> EngineChoice:
    """Options and cores of a run. `why_not_native`: a sentence, where native code cannot be had.

    Raises ValueError for options that do not go together.
    """
    wanted = asked_of(board, asked)
    said = wanted.asked
    note = ""
    unit = wanted.unit
    if unit == AUTO:
        unit = NATIVE if why_not_native is None else NUMPY
        if why_not_native is not None:
            note = f"the numpy unit runs in place of the native one: {why_not_native}"
    options = EngineOptions.from_mapping({**said, "unit": unit})
    found: dict[str, Any] = {}
    threads = wanted.threads if wanted.threads is not None else board.wanted_threads
    if isinstance(threads, int):
        found["threads"] = threads
    elif tuned is not None:
        found["threads"] = tuned.threads
    if tuned is not None and tuned.kv_layout and "kv_layout" not in said:
        found["kv_layout"] = tuned.kv_layout
    if tuned is not None and tuned.huge_pages is not None and "huge_pages" not in said:
        found["huge_pages"] = tuned.huge_pages
    return EngineChoice(
        dataclasses.replace(options, **found), pinned_cpus(board.pin, facts, tuned), note
    )


def pinned_cpus(
    pin: str | tuple[int, ...], facts: Facts, tuned: Tuned | None
) -> tuple[int, ...] | None:
    """The cores to run on: a list as it stands, what the board was measured to be best on, "big" as
    its facts say. None: all that are allowed."""
    if not isinstance(pin, str):
        return pin
    if pin == "none":
        return None
    if tuned is not None and tuned.cpus is not None:
        return tuned.cpus
    return (facts.big_cores or None) if pin == "big" else None


def open_to_measurement(board: Board, asked: Engine) -> bool:
    """Whether the number of threads or the cores are left to the board's ladder."""
    threads = asked.threads if asked.threads is not None else board.wanted_threads
    return threads == AUTO or board.pin == AUTO
