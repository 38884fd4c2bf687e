"""A measurement has its board alone: what earlier runs left is ended first, or nothing starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.boards import virtual
from harness.boards.care import Care
from harness.deploy.cache import locked
from harness.farm.progress import Silent
from harness.farm.runner import stop_virtual_boards
from harness.jobs import lifecycle
from harness.paths import cache_dir

BOARD = "  v: {virtual: {}}"
Begin = Callable[[Any, str], "subprocess.Popen[bytes]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Begins a process that is part of a run on board v, on which something ran before."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(lab: Any, run_id: str) -> subprocess.Popen[bytes]:
        (runs,) = (lab.home / "boards" / "v").rglob("runs")
        (runs / run_id).mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); import time; time.sleep(120)"],
            env={**os.environ, "ENGINE_RUN_ID": run_id},
            stdout=subprocess.PIPE,
        )
        begun.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # by now it is that program, with that environment
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def test_beside_a_run_of_somebody_else_nothing_is_measured(lab: Any, begin: Begin) -> None:
    boards = lab.boards(BOARD)
    assert lab.run(boards, stages=["tiny"]).exit_code == 0
    run_id = uuid.uuid4().hex
    process = begin(lab, run_id)
    item = lab.run(boards, stages=["tiny"]).results["v"]["tiny"]
    assert (item.outcome.value, item.error_kind, item.attempts) == ("error", "busy", 1)
    assert f"run {run_id} since 20" in item.verdict.headline
    assert str(process.pid) in " ".join(item.explain())
    assert process.poll() is None, "what is not ours must not be ended"
    process.kill()
    process.wait()
    assert lab.run(boards, stages=["tiny"]).exit_code == 0


def test_what_a_judged_run_of_ours_left_alive_is_ended_before_the_next(
    lab: Any, begin: Begin
) -> None:
    boards = lab.boards(BOARD)
    first = lab.run(boards, stages=["tiny"]).results["v"]["tiny"]
    process = begin(lab, first.run_id)
    assert lab.run(boards, stages=["tiny"]).exit_code == 0
    assert process.wait(timeout=5) < 0
    assert lab.spools() == []


def test_what_cannot_be_ended_makes_the_board_busy_and_is_told(
    lab: Any, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = lab.boards(BOARD)
    first = lab.run(boards, stages=["tiny"]).results["v"]["tiny"]
    begin(lab, first.run_id)
    clean_up = lifecycle.clean_up

    def resist(session: Any, deployment: Any, run: Any, deadline: Any) -> list[str]:
        if run.run_id == first.run_id:
            return ["process 7 (engine, state D)"]
        return clean_up(session, deployment, run, deadline)

    monkeypatch.setattr(lifecycle, "clean_up", resist)
    result = lab.run(boards, stages=["tiny"])
    assert result.results["v"]["tiny"].error_kind == "busy"
    assert first.run_id in result.results["v"]["tiny"].verdict.headline
    assert result.left_behind == ("v: process 7 (engine, state D)",)
    # Nothing restarts this board, so it is kept out until somebody has looked at it.
    aside = Care(lab.store).quarantined("v")
    assert aside is not None
    assert "it does not get clean: process 7" in aside.reason
    assert lab.run(boards, stages=["tiny"]).results["v"]["tiny"].error_kind == "quarantined"


def test_a_second_attempt_looks_at_the_board_anew(lab: Any) -> None:
    boards = lab.boards("  v: {virtual: {reboot_at: 3600}}")
    result = lab.run(boards, stages=["stress"], reporter=lab.provoking("stress"))
    first, second = lab.store.campaign_runs(result.id)
    assert (first.error_kind, second.outcome) == ("board-reset", "pass")
    assert second.facts["boot_id"] == second.boot_id != first.facts["boot_id"]


def test_a_virtual_board_that_somebody_else_holds_is_not_stopped(lab: Any) -> None:
    boards = lab.boards(BOARD)
    virtual.ensure_running(boards[0])
    lease = lab.leases.acquire("v", "ann", "a test of hers", 600)
    stop_virtual_boards(lab.store, boards)
    assert [state.name for state in virtual.running()] == ["v"]
    assert lab.leases.holder("v").owner == "ann"
    lease.release()
    stop_virtual_boards(lab.store, boards)
    assert virtual.running() == []
    assert lab.leases.holder("v") is None


def test_stopping_does_not_wait_for_another_process_that_makes_the_bundle(lab: Any) -> None:
    stop = threading.Event()

    class Stopper(Silent):
        def activity(
            self, board: str, stage: str, text: str, fraction: float | None = None
        ) -> None:
            del board, stage, fraction
            if text == "building the bundle":
                stop.set()

    # As if another process were fetching numpy all the while.
    with locked(cache_dir("wheels") / ".numpy.lock"):
        result = lab.run(lab.boards(BOARD), stages=["tiny"], reporter=Stopper(), stop=stop)
    assert result.interrupted
    assert lab.leases.held() == []
    assert lab.processes() == []


def test_a_run_is_stored_with_all_that_makes_it_comparable(lab: Any) -> None:
    boards = lab.boards(
        "  v: {virtual: {}, engine: {unit: packed}, "
        "toolchain: {kind: cc, command: gcc, flags: [-O2]}}"
    )
    result = lab.run(boards, stages=["tiny"])
    (row,) = lab.store.campaign_runs(result.id)
    assert row.outcome == "pass"
    assert row.toolchain == "cc gcc -O2"
    assert (row.engine["unit"], row.engine["engine"]["executor"]) == ("packed", "sync")
    assert row.engine["threads"] == 1
    assert len(row.quant_hash) == 64
    assert row.power_mode == (row.facts["governor"] or None)
