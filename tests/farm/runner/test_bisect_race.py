"""`harness bisect race` on virtual boards: a planted race is named, a clean board is not blamed, an
interrupted search goes on."""

from __future__ import annotations

from typing import Any

from harness.store.searches import Searches

BOARD = "  {name}: {{virtual: {{}}, engine: {{unit: packed}}, environment: {{{environment}}}}}\n"
OP = "L01.attn.out"


def boards(lab: Any, name: str, fault: str = "") -> None:
    environment = f'ENGINE_FAULT: "{fault}"' if fault else ""
    lab.boards(BOARD.format(name=name, environment=environment))


def test_a_planted_race_is_named_with_its_missing_edge_and_an_interrupted_search_goes_on(
    lab: Any,
) -> None:
    boards(lab, "v", f"drop-edge:0.3@{OP}")
    words = ["bisect", "race", "--board", "v", "--budget", "400", "--json"]
    searches = Searches(lab.store)

    def under_way() -> str | None:
        rows = searches.newest("race")
        return rows[0].id if rows and len(searches.trials(rows[0].id)) >= 3 else None

    first = lab.command(*words)
    search = lab.wait(under_way)
    first.interrupt()
    assert first.process.wait(60) == 2
    kept = searches.trials(search)
    assert lab.spools() == []  # nothing is left on the board
    assert lab.leases.holder("v") is None

    code, result = lab.command(*words).finish()
    assert code == 0, result
    assert result["search"] == search
    assert searches.trials(search)[: len(kept)] == kept
    assert result["outcome"] == "named"
    (race,) = result["races"]
    assert race["steps"] == [OP]
    assert race["probability"] >= 0.98
    assert result["trials"] <= 400
    assert (
        f"`{OP}` completes after `L01.attn.add` starts, which reads `{OP}`: "
        "no event between matrix and vector queue" in race["sentence"]
    )
    row = searches.get(search)
    assert (row.outcome, row.culprits) == ("named", [OP])
    assert lab.spools() == []

    again = race["command"].split()
    assert again[:3] == ["harness", "bisect", "race"]
    code, tried = lab.command(*again[1:], "--json").finish()
    assert code == 1
    assert tried["failed"] >= 1


def test_on_a_clean_board_nothing_is_blamed(lab: Any) -> None:
    boards(lab, "v")
    command = lab.command("bisect", "race", "--board", "v", "--delay-ms", "0.5", "--json")
    code, result = command.finish()
    assert code == 1
    assert result["outcome"] == "not-reproduced"
    assert result["races"] == []
    assert result["trials"] >= 90
