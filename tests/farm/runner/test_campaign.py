"""Bring-up on several virtual boards: side by side, isolated, clean afterwards."""

from __future__ import annotations

import threading
from typing import Any

from harness.store.crashes import Crashes

PASSED = {"tiny": "pass", "accuracy": "pass", "curve": "pass", "stress": "pass"}
NOBODY = "{host: 127.0.0.1, port: 1, host_key: 'SHA256:" + "A" * 43 + "'}"


def test_three_boards_run_all_stages_side_by_side_and_are_left_clean(lab: Any) -> None:
    boards = lab.boards(
        "  a: {virtual: {}}\n  b: {virtual: {noisy_shell: true}}\n  c: {virtual: {}}"
    )
    together, met = threading.Barrier(3), set()

    def meet(board: str, stage: str, fraction: float | None) -> None:
        # Each board waits in its stage until all three are in it: they cannot run in turn.
        if stage == "tiny" and fraction is not None and board not in met:
            met.add(board)
            together.wait(timeout=60)

    reporter = lab.recorder(meet)
    result = lab.run(boards, reporter=reporter)
    for board in boards:
        assert lab.outcomes(result, board.name) == PASSED, result.as_json()
        assert [stage for name, stage in reporter.order if name == board.name] == list(PASSED)
        assert lab.leases.holder(board.name) is None
    assert result.exit_code == 0
    assert lab.spools() == []
    assert lab.processes() == []
    rows = lab.store.campaign_runs(result.id)
    assert len(rows) == 12
    assert {row.state for row in rows} == {"judged"}
    assert all(row.facts and row.engine_hash and row.boot_id for row in rows)
    assert all(row.seconds is not None and row.series for row in rows)


def test_trouble_with_boards_is_their_error_and_the_others_pass(lab: Any) -> None:
    bad = {
        "unreachable": NOBODY,
        "no-python": "{virtual: {no_python: true}}",
        "no-space": "{virtual: {full_disk: true}}",
        "no-folder": "{virtual: {}, folders: [/proc/engine]}",
    }
    text = "".join(f"  {name}: {board}\n" for name, board in bad.items())
    result = lab.run(lab.boards(text + "  good: {virtual: {}}"), stages=["tiny", "accuracy"])
    assert lab.outcomes(result, "good") == {"tiny": "pass", "accuracy": "pass"}
    assert result.exit_code == 2
    for kind in bad:
        item, later = result.results[kind]["tiny"], result.results[kind]["accuracy"]
        assert (item.outcome.value, item.error_kind) == ("error", kind)
        assert item.verdict.remedy
        assert later.verdict.headline == "blocked by tiny"
        stored = {row.stage: row for row in lab.store.campaign_runs(result.id, kind)}
        assert (stored["tiny"].outcome, stored["tiny"].error_kind) == ("error", kind)
        assert stored["tiny"].remedy == item.verdict.remedy
        assert stored["accuracy"].outcome == "blocked"
    assert lab.leases.held() == []


def test_another_host_key_is_an_error_that_shows_both(lab: Any) -> None:
    from harness.boards.virtual import ensure_running

    endpoint = ensure_running(lab.boards("  v: {virtual: {}}")[0])
    pinned = "SHA256:" + "B" * 42 + "A"
    boards = lab.boards(
        f"  w: {{host: 127.0.0.1, port: {endpoint.port}, user: {endpoint.user}, "
        f"key_file: '{endpoint.key_file}', host_key: '{pinned}'}}"
    )
    result = lab.run(boards, stages=["tiny"])
    item = result.results["w"]["tiny"]
    assert (item.outcome.value, item.error_kind) == ("error", "host-key")
    said = " ".join(item.explain())
    assert endpoint.host_key in said
    assert pinned in said


def test_a_planted_fault_fails_accuracy_names_its_op_and_blocks_the_rest(lab: Any) -> None:
    boards = lab.boards(
        "  sick: {virtual: {}, environment: {ENGINE_FAULT: 'scale:1.02@L02.ffn.down'}}\n"
        "  well: {virtual: {}}"
    )
    result = lab.run(boards, stages=["tiny", "accuracy", "curve"])
    sick = result.results["sick"]["accuracy"]
    assert sick.outcome.value == "fail"
    assert sick.verdict.culprit == "L02.ffn.down"
    assert lab.outcomes(result, "sick")["curve"] == "blocked"
    assert lab.outcomes(result, "well") == {"tiny": "pass", "accuracy": "pass", "curve": "pass"}
    assert result.exit_code == 1
    # A finding is never tried again until it passes.
    rows = lab.store.campaign_runs(result.id, "sick")
    assert [row.stage for row in rows] == ["tiny", "accuracy", "curve"]


def test_a_link_that_drops_in_mid_run_loses_nothing(lab: Any) -> None:
    boards = lab.boards("  v: {virtual: {drop_link_at: 3600}}")
    result = lab.run(boards, stages=["stress"], reporter=lab.provoking("stress"))
    assert lab.outcomes(result, "v") == {"stress": "pass"}
    started = [row for row in lab.store.campaign_runs(result.id) if row.remote_spool]
    assert len(started) == 1


def test_a_board_that_reboots_in_mid_run_is_tried_once_more_and_both_tries_are_kept(
    lab: Any,
) -> None:
    console = "console: {command: 'echo Kernel panic - not syncing; exec sleep 600'}"
    boards = lab.boards(f"  v: {{virtual: {{reboot_at: 3600}}, {console}}}")
    result = lab.run(boards, stages=["stress"], reporter=lab.provoking("stress"))
    first, second = lab.store.campaign_runs(result.id)
    assert (first.outcome, first.error_kind, first.attempt) == ("error", "board-reset", 1)
    assert "Kernel panic - not syncing" in first.checks[-1].sentence  # the console's last words
    (crash,) = Crashes(lab.store).groups()
    assert (crash.newest.name, crash.runs) == ("board-reset", (first.id,))
    assert "console" in [series.name for series in second.series]
    assert (second.outcome, second.attempt) == ("pass", 2)
    assert result.results["v"]["stress"].attempts == 2


def test_a_board_that_somebody_holds_is_busy_and_stays_theirs(lab: Any) -> None:
    boards = lab.boards("  v: {virtual: {}}")
    lease = lab.leases.acquire("v", "ann", "debugging the NPU", 600)
    item = lab.run(boards, stages=["tiny"]).results["v"]["tiny"]
    assert (item.outcome.value, item.error_kind) == ("error", "busy")
    assert "ann (debugging the NPU)" in item.verdict.headline
    holder = lab.leases.holder("v")
    assert (holder.owner, holder.token) == ("ann", lease.token)


def test_stopping_cancels_the_runs_and_cleans_and_releases_the_boards(lab: Any) -> None:
    boards = lab.boards("  v: {virtual: {}}\n  w: {virtual: {}}")
    stop = threading.Event()

    def stop_in_stress(board: str, stage: str, fraction: float | None) -> None:
        del board
        if stage == "stress" and fraction:
            stop.set()

    reporter = lab.recorder(stop_in_stress)
    result = lab.run(boards, stages=["tiny", "stress"], reporter=reporter, stop=stop)
    assert (result.interrupted, result.exit_code) == (True, 2)
    for board in boards:
        assert lab.outcomes(result, board.name)["tiny"] == "pass"
        assert result.results[board.name]["stress"].error_kind == "interrupted"
    assert lab.leases.held() == []
    assert lab.spools() == []
    assert lab.processes() == []
