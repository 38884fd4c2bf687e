"""A short night on twelve bad boards: what `make chaos` does in full, with seconds of stress."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from harness.boards import virtual
from harness.farm import board as board_module
from harness.farm.nightly import report
from harness.farm.runner import Resume, bringup
from harness.farm.selection import choose_boards, choose_stages
from harness.farm.series import KIND
from harness.jobs import lifecycle
from tests.chaos.expected import FARM, TIMED, claims

STAGES = ["tiny", "stress"]


def test_a_night_on_a_bad_farm_measures_the_healthy_names_the_sick_and_loses_nothing(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The usual patience with a board that is gone is minutes.
    monkeypatch.setattr(lifecycle, "follow", functools.partial(lifecycle.follow, reconnect_s=5.0))
    monkeypatch.setattr(board_module, "CONNECT_S", 10.0)
    provoked: set[str] = set()

    def provoke(board: str, stage: str, fraction: float | None) -> None:
        if board in TIMED and stage == "stress" and fraction and board not in provoked:
            provoked.add(board)
            virtual.provoke(board)

    result = bringup(
        choose_boards(FARM, (), ()),
        lab.model,
        lab.options.model_copy(update={"stall_seconds": 15.0}),
        lab.store,
        lab.recorder(provoke),
        stop=threading.Event(),
        stages=choose_stages(STAGES),
        resume=Resume.NEVER,
        kind=KIND,
    )
    assert provoked == set(TIMED)
    told = report(lab.store, result, 0.0).as_json()
    failed = [str(claim) for claim in claims(told, lab.home, STAGES) if not claim.holds]
    assert failed == []
