"""`harness bisect race` on virtual boards: a planted race is named, a clean board is not blamed, an
interrupted search goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.store.searches import Searches

OP = "L01.attn.out"
FAULT = f"drop-edge:0.8@{OP}"
BOARDS = f"""
  v: {{virtual: {{}}, engine: {{unit: packed}}, environment: {{ENGINE_FAULT: "{FAULT}"}}}}
  clean: {{virtual: {{}}, engine: {{unit: packed}}}}
"""


def test_a_planted_race_is_named_an_interrupted_search_goes_on_and_a_clean_board_is_not_blamed(
    lab: Any,
) -> None:
    lab.boards(BOARDS)
    clean = lab.command(
        "bisect", "race", "--board", "clean", "--delay-ms", "0.5", "--json"
    )  # meanwhile
    words = ["bisect", "race", "--board", "v", "--budget", "400", "--json"]
    searches = Searches(lab.store)

    def spools() -> list[Path]:
        return [path for path in lab.spools() if "v" in path.relative_to(lab.home).parts]

    def under_way() -> str | None:
        rows = [row for row in searches.newest("race") if row.board == "v"]
        return rows[0].id if rows and len(searches.trials(rows[0].id)) >= 3 else None

    first = lab.command(*words)
    search = lab.wait(under_way)
    first.interrupt()
    assert first.process.wait(60) == 2
    kept = searches.trials(search)
    assert spools() == []  # nothing is left on the board
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
    shares = {one["name"]: one["probability"] for one in result["posterior"]}
    assert max(shares, key=shares.__getitem__) == OP  # what the page draws
    row = searches.get(search)
    assert row.details["posterior"] == result["posterior"]
    assert (row.outcome, row.culprits) == ("named", [OP])
    assert spools() == []

    again = race["command"].split()
    assert again[:3] == ["harness", "bisect", "race"]
    code, tried = lab.command(*again[1:], "--json").finish()
    assert code == 1
    assert tried["failed"] >= 1

    code, result = clean.finish()
    assert code == 1
    assert result["outcome"] == "not-reproduced"
    assert result["races"] == []
    assert result["trials"] >= 90
