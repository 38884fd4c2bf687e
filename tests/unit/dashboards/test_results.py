"""From the store to the records of the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dashboards.data import Details, Results, cases_of
from dashboards.reading import load, ready_event, stamp
from harness.store import Store
from harness.verdicts import Outcome, Verdict


@pytest.fixture(scope="module")
def results(troubled_store: Store) -> Results:
    return load(troubled_store)


def case_of(results: Results, board: str) -> Any:
    return next(case for case in results.cases if case.board.name == board)


def test_a_case_shows_the_newest_run_of_each_stage_and_what_was_before(results: Results) -> None:
    case = case_of(results, "rk3588-01")
    assert {stage: run.status for stage, run in case.runs.items()} == {
        "tiny": "pass",
        "accuracy": "fail",
        "curve": "blocked",
        "stress": "blocked",
    }
    assert {run.status for run in case.earlier.values()} == {"pass"}
    assert case.status == "fail"


def test_the_run_to_look_at_is_the_cause_not_what_it_blocks(results: Results) -> None:
    assert case_of(results, "rk3588-01").trouble.stage == "accuracy"
    assert case_of(results, "orin-nano-02").trouble.error_kind == "host-key"
    assert case_of(results, "pi5-03").trouble is None


def test_a_second_attempt_of_the_same_campaign_is_no_change_since_the_last_one(
    store: Store, sample: Any
) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    error = Verdict(outcome=Outcome.ERROR, headline="the link was lost")
    book.run("b1", "tiny", error, error_kind="board-lost")
    book.run("b1", "tiny", sample.tiny_verdict())
    (case,) = load(store).cases
    assert case.runs["tiny"].status == "pass"
    assert not case.earlier


def test_the_tiny_model_counts_for_the_model_that_is_brought_up(store: Store, sample: Any) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("b1", "tiny", sample.tiny_verdict(), model="tiny-0")
    book.run("b1", "accuracy", sample.accuracy_verdict(1))
    (case,) = load(store).cases
    assert case.model == sample.MODEL
    assert set(case.runs) == {"tiny", "accuracy"}


def test_a_planted_fault_is_read_from_what_the_engine_reported(
    results: Results, sample: Any
) -> None:
    assert case_of(results, "rk3588-01").runs["accuracy"].fault == sample.FAULT
    assert case_of(results, "pi5-03").runs["accuracy"].fault is None


def test_a_run_without_a_verdict_is_running_while_its_campaign_lives(
    store: Store, sample: Any
) -> None:
    sample.record_unfinished(store)
    (case,) = load(store).cases
    assert case.status == "running"


def test_a_run_without_a_verdict_of_an_ended_campaign_was_stopped(
    store: Store, sample: Any
) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("b1", "tiny", None)
    book.finish(Outcome.INVALID)
    (case,) = load(store).cases
    assert case.runs["tiny"].status == "stopped"
    assert case.status == "stopped"


def test_the_stamp_changes_with_every_step_of_a_run(store: Store, sample: Any) -> None:
    stamps = [stamp(store)]
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    stamps.append(stamp(store))
    run_id = book.run("b1", "tiny", None)
    stamps.append(stamp(store))
    store.running(run_id, "/spool", {})
    stamps.append(stamp(store))
    store.finish_run(run_id, sample.tiny_verdict())
    stamps.append(stamp(store))
    book.finish(Outcome.PASS)
    stamps.append(stamp(store))
    assert len(set(stamps)) == len(stamps)
    assert stamp(store) == stamps[-1]


def test_only_the_newest_runs_of_a_stage_keep_a_page(store: Store, sample: Any) -> None:
    book = sample.Recorder(store)
    for _ in range(9):
        book.campaign("harness", "bringup")
        book.run("b1", "tiny", sample.tiny_verdict())
    results = load(store)
    assert len(results.runs) == 5
    assert len(results.cases[0].history) == 9


def test_one_unreadable_field_does_not_hide_the_others(sample: Any) -> None:
    raw = dict(sample.curve_verdict(1).details)
    del raw["ttft_s"]
    raw["fit"] = {**raw["fit"], "slope_us_per_position": "steep"}
    details = Details("curve", raw)
    assert details["ttft_s"] is None
    assert details["fit"] is None
    assert len(details["points"]) == len(raw["points"])
    assert details.problems[0].startswith("fit.slope_us_per_position: ")
    assert "ttft_s is missing" in details.problems


def test_details_of_an_unknown_stage_or_of_no_run_are_empty() -> None:
    assert Details("thermal", {"a": 1})["a"] is None
    assert Details("curve", None).empty
    assert not Details("curve", None)


@pytest.mark.parametrize(
    "content",
    [b"", b"not json\n", b'{"v":1,"n":0,"t_ns":1,"kind":"ready","data":{"unit":"x"}}'],
    ids=["empty", "broken", "cut short"],
)
def test_a_run_whose_events_are_broken_reports_nothing_of_its_engine(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    assert ready_event(path) == {}
    assert ready_event(tmp_path / "missing") == {}


def test_grouping_does_not_depend_on_the_order_of_the_rows(results: Results) -> None:
    runs = [run for case in results.cases for run in case.history]
    assert cases_of(runs) == cases_of(runs[::-1])
