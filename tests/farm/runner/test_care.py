"""Boards that die or compute wrongly, in campaigns: restarted, set aside, re-admitted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

import harness.connect.session as session_module
import harness.farm.board as board_module
from harness.boards import recovery, virtual
from harness.boards.care import HEALTH, POWER, Care
from harness.boards.virtual import namespace
from harness.connect.watch import Watch
from harness.farm import canary
from harness.farm.runner import HEALTH_CHECK, Resume, bringup
from harness.jobs import lifecycle
from harness.jobs.health import HEALTH as HEALTH_STAGE
from harness.jobs.stress import StressStage

FAKE = "power: {driver: fake}, boot_seconds: 5"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead board is given up in seconds."""
    if not namespace.supported():
        pytest.skip("needs mount namespaces for this user")
    monkeypatch.setattr(lifecycle, "follow", functools.partial(lifecycle.follow, reconnect_s=2.0))
    monkeypatch.setattr(board_module, "CONNECT_S", 3.0)
    monkeypatch.setattr(recovery, "ANSWER_S", 3.0)
    quick = functools.partial(Watch, period_s=0.5, limit_s=1.5)
    monkeypatch.setattr(session_module, "Watch", quick)


def test_a_board_that_freezes_is_power_cycled_and_its_next_attempt_passes(
    lab: Any, impatient: None
) -> None:
    del impatient
    boards = lab.boards(f"  v: {{virtual: {{freeze_after: 3600}}, {FAKE}}}")
    reporter = lab.provoking("stress")
    result = lab.run(boards, stages=["stress"], reporter=reporter)
    assert lab.outcomes(result, "v") == {"stress": "pass"}, reporter.notes
    rows = lab.store.campaign_runs(result.id)
    assert (rows[0].outcome, rows[0].error_kind, rows[-1].outcome) == (
        "error",
        "board-lost",
        "pass",
    )
    assert rows[0].boot_id != rows[-1].boot_id
    (event,) = Care(lab.store).events("v")
    assert (event.kind, event.good) == (POWER, True)
    assert Care(lab.store).quarantined("v") is None
    assert lab.spools() == []
    assert lab.processes() == []


def test_a_board_that_stays_dead_is_set_aside_skipped_next_time_and_readmitted_by_a_check(
    lab: Any, impatient: None
) -> None:
    del impatient
    well = f"  v: {{virtual: {{}}, {FAKE}}}"
    dead = f"  v: {{virtual: {{refuse: always}}, {FAKE}}}"
    care = Care(lab.store)
    assert lab.run(lab.boards(well), stages=["tiny"]).exit_code == 0

    item = lab.run(lab.boards(dead), stages=["tiny"]).results["v"]["tiny"]
    assert (item.outcome.value, item.error_kind) == ("error", "unreachable")
    aside = care.quarantined("v")
    assert aside is not None
    assert "refuses connections" in aside.reason
    assert "power cycle" in aside.reason
    tried = care.events("v")

    result = lab.run(lab.boards(dead), stages=["tiny", "accuracy"])
    item = result.results["v"]["tiny"]
    assert (item.outcome.value, item.error_kind, result.exit_code) == ("error", "quarantined", 2)
    assert aside.reason[:40] in item.verdict.headline
    assert "harness boards health v" in (item.verdict.remedy or "")
    assert lab.outcomes(result, "v")["accuracy"] == "blocked"
    assert care.events("v") == tried, "nothing was tried on it again"

    assert check(lab, lab.boards(dead)).exit_code == 2
    assert care.quarantined("v") is not None
    assert check(lab, lab.boards(well)).exit_code == 0
    assert care.quarantined("v") is None
    assert [event.good for event in care.events("v", kind=HEALTH)] == [True]
    assert lab.run(lab.boards(well), stages=["tiny"]).exit_code == 0


def check(lab: Any, boards: Any) -> Any:
    """`harness boards health`, in this process."""
    return bringup(
        boards,
        lab.model,
        lab.options,
        lab.store,
        lab.recorder(),
        stop=threading.Event(),
        stages=[HEALTH_STAGE],
        resume=Resume.NEVER,
        kind=HEALTH_CHECK,
    )


def test_a_board_that_was_never_reached_is_not_set_aside(lab: Any) -> None:
    nobody = "{host: 127.0.0.1, port: 1, host_key: 'SHA256:" + "A" * 43 + "'}"
    item = lab.run(lab.boards(f"  typo: {nobody}"), stages=["tiny"]).results["typo"]["tiny"]
    assert item.error_kind == "unreachable"
    assert Care(lab.store).quarantined("typo") is None


def test_one_dead_board_does_not_keep_the_others(lab: Any) -> None:
    Care(lab.store).quarantine("dead", "it was lost")
    boards = lab.boards("  dead: {virtual: {}}\n  well: {virtual: {}}")
    result = lab.run(boards, stages=["tiny"])
    assert lab.outcomes(result, "well") == {"tiny": "pass"}
    assert result.results["dead"]["tiny"].error_kind == "quarantined"
    assert not virtual.board_folder("dead").joinpath("home").exists(), "it was not even started"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stress stage of seconds counts as long."""
    monkeypatch.setattr(canary, "LONG_MINUTES", 0.0)


def test_a_long_stage_is_checked_before_and_after(lab: Any, guarded: None) -> None:
    del guarded
    result = lab.run(lab.boards("  v: {virtual: {}}"), stages=["stress"])
    assert lab.outcomes(result, "v") == {"stress": "pass"}
    stages = [(row.stage, row.outcome) for row in lab.store.campaign_runs(result.id)]
    assert stages == [("health", "pass"), ("stress", "pass"), ("health", "pass")]
    assert [event.good for event in Care(lab.store).events("v", kind=HEALTH)] == [True, True]


def test_a_short_stage_is_not_worth_a_check(lab: Any) -> None:
    result = lab.run(lab.boards("  v: {virtual: {}}"), stages=["stress"])
    assert [row.stage for row in lab.store.campaign_runs(result.id)] == ["stress"]


def test_a_board_that_turned_sick_is_set_aside_and_the_stage_stands(
    lab: Any, guarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del guarded
    boards = lab.boards("  v: {virtual: {}}")
    when_judged(monkeypatch, lambda: plant(boards, "scale:3@L01.ffn.down"))
    result = lab.run(boards, stages=["stress"])
    assert lab.outcomes(result, "v") == {"stress": "pass"}
    aside = Care(lab.store).quarantined("v")
    assert aside is not None
    assert "failed a health check after stress: Tokens differ" in aside.reason


def test_a_stage_that_failed_on_a_sick_board_blames_no_commit(
    lab: Any, guarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del guarded
    # The tiny model of the check has no third layer: the board passes before the stage.
    fault = "scale:1.5@L02.ffn.down"
    boards = lab.boards(f"  v: {{virtual: {{}}, environment: {{ENGINE_FAULT: '{fault}'}}}}")
    when_judged(monkeypatch, lambda: plant(boards, "scale:3@L01.ffn.down"))
    result = lab.run(boards, stages=["stress"])
    item = result.results["v"]["stress"]
    assert item.outcome.value == "invalid"
    assert item.verdict.headline.startswith("the board is sick, so not judged: ")
    assert "fail" in [check.outcome.value for check in item.verdict.checks], "the evidence stays"
    assert lab.store.run(item.run_id).outcome == "invalid"


def test_a_stage_that_failed_on_a_board_that_is_well_stays_failed(lab: Any, guarded: None) -> None:
    del guarded
    fault = "scale:1.5@L02.ffn.down"
    boards = lab.boards(f"  v: {{virtual: {{}}, environment: {{ENGINE_FAULT: '{fault}'}}}}")
    result = lab.run(boards, stages=["stress"])
    assert lab.outcomes(result, "v") == {"stress": "fail"}
    assert Care(lab.store).quarantined("v") is None


def test_a_board_that_computes_wrongly_before_a_long_stage_does_not_begin_it(
    lab: Any, guarded: None
) -> None:
    del guarded
    fault = "scale:3@L01.ffn.down"
    boards = lab.boards(f"  v: {{virtual: {{}}, environment: {{ENGINE_FAULT: '{fault}'}}}}")
    result = lab.run(boards, stages=["stress"])
    item = result.results["v"]["stress"]
    assert (item.outcome.value, result.exit_code) == ("blocked", 1)
    assert item.verdict.headline.startswith("blocked by health: Tokens differ")
    stages = [(row.stage, row.outcome) for row in lab.store.campaign_runs(result.id)]
    assert stages == [("health", "fail"), ("stress", "blocked")]
    assert Care(lab.store).quarantined("v") is None, "it may be the engine"


def when_judged(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """`act` is called when a stress stage has run and is about to be judged."""
    judge = StressStage.judge

    def judged(self: StressStage, context: Any, log: Any) -> Any:
        act()
        return judge(self, context, log)

    monkeypatch.setattr(StressStage, "judge", judged)


def plant(boards: Any, faults: str) -> None:
    """From now on the engine computes wrongly on the board."""
    boards[0].environment["ENGINE_FAULT"] = faults
