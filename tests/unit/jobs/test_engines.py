"""What the engine runs with on a board: the command line, the board's entry, its measurement."""

from __future__ import annotations

from typing import Any

import pytest

from harness.boards.facts import CpuFacts, Facts
from harness.inventory import Board, Engine
from harness.jobs.engines import (
    EngineChoice,
    Tuned,
    choose_engine,
    may_fall_back,
    open_to_measurement,
    pinned_cpus,
    wants_native,
)

FACTS = Facts(
    machine="aarch64",
    kernel="Linux",
    cpus=tuple(CpuFacts(number=n, capacity=400 + 600 * (n > 1)) for n in range(4)),
)
NO_COMPILER = "no compiler is here"
LADDER = Tuned(threads=2, cpus=(2, 3), kv_layout="ds", huge_pages=True)


def choose(
    board: dict[str, Any] | None = None, asked: dict[str, Any] | None = None, **more: Any
) -> EngineChoice:
    made = Board(**{"name": "b", "host": "192.0.2.1", **(board or {})})
    return choose_engine(made, FACTS, Engine(**(asked or {})), **more)


def test_a_board_runs_the_native_unit_with_its_own_defaults() -> None:
    options = choose().options
    assert (options.unit, options.executor, options.activations) == ("native", "compiled", "int8")


def test_without_native_code_numpy_runs_and_the_result_says_why() -> None:
    choice = choose(why_not_native=NO_COMPILER)
    assert (choice.options.unit, choice.options.executor) == ("packed", "sync")
    assert NO_COMPILER in choice.note
    assert choose().note == ""


def test_only_a_board_of_which_nothing_special_was_asked_falls_back_to_numpy() -> None:
    plain = Board(name="b", host="h", threads=2)
    assert may_fall_back(plain, Engine())
    assert not may_fall_back(plain, Engine(kv="int8"))
    assert not may_fall_back(plain, Engine(unit="native"))
    assert wants_native(plain, Engine())
    assert not wants_native(plain, Engine(unit="packed"))


def test_the_command_line_goes_before_the_boards_entry() -> None:
    board = {"engine": {"unit": "native", "kv": "int8", "fused": False}}
    options = choose(board, {"kv": "f32"}).options
    assert (options.unit, options.kv, options.fused) == ("native", "f32", False)


def test_threads_and_cores_that_are_open_are_those_that_the_ladder_found() -> None:
    choice = choose(tuned=LADDER)
    assert (choice.options.threads, choice.pin) == (2, (2, 3))
    assert (choice.options.kv_layout, choice.options.huge_pages) == ("ds", True)


def test_what_was_asked_for_is_not_replaced_by_a_measurement() -> None:
    board = {"threads": 1, "pin": [0], "engine": {"kv_layout": "sd", "huge_pages": False}}
    choice = choose(board, tuned=LADDER)
    assert (choice.options.threads, choice.pin) == (1, (0,))
    assert (choice.options.kv_layout, choice.options.huge_pages) == ("sd", False)
    assert choose({}, {"threads": 3}, tuned=LADDER).options.threads == 3


@pytest.mark.parametrize(
    ("pin", "tuned", "cpus"),
    [
        ("auto", None, None),
        ("auto", LADDER, (2, 3)),
        ("big", None, (2, 3)),  # capacity, not number
        ("none", LADDER, None),
        ((1, 0), LADDER, (1, 0)),
    ],
)
def test_pinning(pin: Any, tuned: Tuned | None, cpus: tuple[int, ...] | None) -> None:
    assert pinned_cpus(pin, FACTS, tuned) == cpus


def test_a_ladder_is_of_use_only_where_threads_or_cores_are_open() -> None:
    fixed = Board(name="b", host="h", threads=2, pin="none")
    assert not open_to_measurement(fixed, Engine())
    assert open_to_measurement(Board(name="b", host="h", threads=2), Engine())
    assert open_to_measurement(fixed, Engine(threads="auto"))
