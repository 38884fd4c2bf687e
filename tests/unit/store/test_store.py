"""Campaigns and runs: what is written is what comes back, as a whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from harness.errors import HarnessError
from harness.jobs.details import TinyDetails
from harness.store import BoardRow, ModelRow, RunRow, SeriesRow, Store, options_hash
from harness.store import store as store_module
from harness.verdicts import Check, Outcome, Verdict

processes = multiprocessing.get_context("fork")


@pytest.fixture
def campaign(store: Store) -> str:
    return store.begin_campaign("bringup", ["harness", "bringup"], {"seed": 1})


def test_a_finished_run_comes_back_with_verdict_checks_and_series(
    store: Store, add_run: Callable[..., str], verdict: Verdict
) -> None:
    run = store.run(add_run())
    assert (run.state, run.outcome, run.headline) == ("judged", "fail", verdict.headline)
    assert (run.culprit, run.remedy) == (verdict.culprit, verdict.remedy)
    assert run.details == verdict.details
    assert run.clocks == "unknown"
    assert run.seconds == pytest.approx(3.5)  # by the board's clock, from the events
    speed, greedy = run.checks
    assert (speed.name, speed.measured, speed.limit, speed.unit) == (
        "tokens_per_s_at_end",
        4.5,
        12.0,
        "tok/s",
    )
    assert (greedy.measured, greedy.measured_text, greedy.limit) == (None, "equal", None)
    assert [(item.name, item.path) for item in run.series] == [
        ("events", f"{run.id}/events.jsonl"),
        ("tokens", f"{run.id}/arrays/tokens.npz"),
    ]
    assert all(len(item.sha256) == 64 and item.bytes > 0 for item in run.series)


def test_details_of_a_stage_survive_unchanged(store: Store, campaign: str) -> None:
    details = TinyDetails(
        prompts=4,
        tokens_compared=64,
        first_mismatch=None,
        rss_first_mb=50.125,
        rss_last_mb=50.25,
        tokens_per_s=1e3 / 3,
    )
    run_id = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
    dump = details.model_dump(mode="json")
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline="equal", details=dump))
    assert TinyDetails.model_validate(store.run(run_id).details) == details


def test_a_run_passes_through_its_states(store: Store, campaign: str) -> None:
    run_id = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
    assert store.run(run_id).state == "planned"
    store.running(run_id, "/home/x/spool", {"root": "/home/x", "sent_bytes": 7})
    run = store.run(run_id)
    assert (run.state, run.remote_spool, run.deployment) == (
        "running",
        "/home/x/spool",
        {"root": "/home/x", "sent_bytes": 7},
    )
    store.collected(run_id)
    assert [row.id for row in store.unfinished(campaign, "virt-1")] == [run_id]
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline="equal"))
    assert store.unfinished(campaign, "virt-1") == []
    assert [row.state for row in store.campaign_runs(campaign)] == ["judged"]


def test_every_attempt_is_kept_and_numbered(store: Store, campaign: str) -> None:
    for board, stage in [("a", "tiny"), ("a", "tiny"), ("a", "curve"), ("b", "tiny")]:
        store.begin_run(campaign_id=campaign, board=board, stage=stage)
    runs = store.campaign_runs(campaign)
    assert [(r.board, r.stage, r.attempt) for r in runs] == [
        ("a", "tiny", 1),
        ("a", "tiny", 2),
        ("a", "curve", 1),
        ("b", "tiny", 1),
    ]
    assert len(store.campaign_runs(campaign, "b")) == 1


def test_judging_again_replaces_the_verdict(store: Store, add_run: Callable[..., str]) -> None:
    run_id = add_run()
    check = Check(name="x", outcome=Outcome.PASS, measured=1.0, limit=2.0, sentence="fine")
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline="fine", checks=(check,)))
    run = store.run(run_id)
    assert (run.outcome, run.culprit, [c.name for c in run.checks]) == ("pass", None, ["x"])
    assert len(run.series) == 2


def test_raw_files_from_elsewhere_are_copied_beside_the_results(
    store: Store, campaign: str, tmp_path: Path, verdict: Verdict
) -> None:
    folder = tmp_path / "spool"
    (folder / "arrays").mkdir(parents=True)
    (folder / "arrays" / "a.npz").write_bytes(b"PK")
    run_id = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
    store.finish_run(run_id, verdict, folder)
    assert (store.raw_root / run_id / "arrays" / "a.npz").read_bytes() == b"PK"
    assert [item.name for item in store.run(run_id).series] == ["a"]
    assert (folder / "arrays" / "a.npz").exists()


def test_a_run_that_never_reached_its_board_has_no_series(
    store: Store, campaign: str, verdict: Verdict
) -> None:
    run_id = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
    error = verdict.model_copy(update={"outcome": Outcome.ERROR})
    store.finish_run(run_id, error, error_kind="unreachable")
    run = store.run(run_id)
    assert (run.series, run.error_kind, run.seconds) == ([], "unreachable", None)


def test_unknown_runs_and_campaigns_are_refused(store: Store, verdict: Verdict) -> None:
    with pytest.raises(HarnessError, match="no run 'nope'"):
        store.run("nope")
    with pytest.raises(HarnessError, match="no run 'nope'"):
        store.finish_run("nope", verdict)
    with pytest.raises(HarnessError, match="no campaign 'nope'"):
        store.begin_run(campaign_id="nope", board="virt-1", stage="tiny")


def test_boards_and_models_keep_what_is_not_named_again(store: Store, campaign: str) -> None:
    store.record_board("virt-1", host="127.0.0.1", tags=("virtual",), boot_id="a")
    store.record_board("virt-1", boot_id="b")
    store.record_model("ab" * 32, name="SmolLM2", notes=["embeddings kept in 8 bit"])
    store.begin_run(
        campaign_id=campaign, board="virt-1", stage="tiny", model_hash="ab" * 32, scheme="W4A16"
    )
    with store.database.reading() as session:
        board, model = session.get(BoardRow, "virt-1"), session.get(ModelRow, "ab" * 32)
    assert board is not None
    assert model is not None
    assert (board.host, board.tags, board.boot_id) == ("127.0.0.1", ["virtual"], "b")
    assert (model.name, model.scheme, model.notes) == (
        "SmolLM2",
        "W4A16",
        ["embeddings kept in 8 bit"],
    )
    with pytest.raises(ValueError, match="no column 'colour'"):
        store.record_board("virt-1", colour="red")


def test_ids_are_found_by_their_first_characters(store: Store, campaign: str) -> None:
    first = store.begin_run(campaign_id=campaign, board="a", stage="tiny", run_id="aa11-1")
    store.begin_run(campaign_id=campaign, board="a", stage="tiny", run_id="aa22-1")
    assert store.find_run("aa1") == first
    assert store.find_campaign(campaign[:8]) == store.find_campaign("last") == campaign
    with pytest.raises(HarnessError, match="more than one run begins with 'aa'"):
        store.find_run("aa")
    for text in ("%", "", "zz"):
        with pytest.raises(HarnessError, match="no run"):
            store.find_run(text)


# Interrupted campaigns


def begin_and_die(path: Path, options: dict[str, int]) -> None:
    Store.open(path).begin_campaign("bringup", ["harness"], options)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_campaign(path: Path, options: dict[str, int]) -> None:
    child = processes.Process(target=begin_and_die, args=(path, options))
    child.start()
    child.join()


def test_a_campaign_whose_process_was_killed_is_found_once(store: Store, tmp_path: Path) -> None:
    options = {"seed": 2}
    killed_campaign(tmp_path / "results.sqlite", options)
    found = store.interrupted_campaign("bringup", options_hash(options))
    assert found is not None
    # It belongs to this living process now.
    assert store.interrupted_campaign("bringup", options_hash(options)) is None
    store.finish_campaign(found, Outcome.PASS)
    assert store.campaign(found).outcome == "pass"


def test_only_the_same_options_and_kind_continue_a_campaign(store: Store, tmp_path: Path) -> None:
    killed_campaign(tmp_path / "results.sqlite", {"seed": 2, "minutes": 1})
    assert store.interrupted_campaign("bringup", options_hash({"seed": 3, "minutes": 1})) is None
    assert store.interrupted_campaign("stress", options_hash({"minutes": 1, "seed": 2})) is None
    assert store.interrupted_campaign("bringup", options_hash({"minutes": 1, "seed": 2}))


def test_running_and_finished_campaigns_are_not_interrupted(store: Store, campaign: str) -> None:
    wanted = options_hash({"seed": 1})
    assert store.interrupted_campaign("bringup", wanted) is None  # ours, and alive
    store.finish_campaign(campaign, Outcome.FAIL)
    assert store.interrupted_campaign("bringup", wanted) is None


# Atomic writes


def test_a_run_killed_while_it_is_finished_leaves_nothing_half(
    store: Store, campaign: str, verdict: Verdict, tmp_path: Path
) -> None:
    run_id = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
    (store.raw_folder(run_id) / "events.jsonl").write_bytes(b"")

    def die_after_the_first_check(position: int, check: Check) -> object:
        if position == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return check_row(position, check)

    check_row = store_module.check_row

    def finish() -> None:
        store_module.check_row = die_after_the_first_check  # type: ignore[assignment]  # a stand-in
        Store.open(tmp_path / "results.sqlite").finish_run(run_id, verdict)

    child = processes.Process(target=finish)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run = store.run(run_id)
    assert (run.state, run.outcome, run.checks, run.series) == ("planned", None, [], [])
    store.finish_run(run_id, verdict)  # and the store is not locked
    assert len(store.run(run_id).checks) == 2


def test_a_kill_within_a_written_transaction_leaves_nothing_half(
    store: Store, add_run: Callable[..., str], tmp_path: Path
) -> None:
    run_id = add_run()

    def write_half() -> None:
        with Store.open(tmp_path / "results.sqlite").database.writing() as session:
            row = session.get(RunRow, run_id)
            assert row is not None
            row.outcome = "pass"
            row.checks.clear()
            session.flush()  # the rows are changed in the file's journal now
            os.kill(os.getpid(), signal.SIGKILL)

    child = processes.Process(target=write_half)
    child.start()
    child.join()
    run = store.run(run_id)
    assert run.outcome == "fail"
    assert len(run.checks) == 2


# Concurrency


def write_runs(path: Path, name: str, count: int) -> None:
    opened = Store.open(path)  # all open at once: one of them creates the schema
    campaign = opened.begin_campaign("bringup", [name], {})
    for _ in range(count):
        run_id = opened.begin_run(campaign_id=campaign, board=name, stage="tiny")
        check = Check(name="x", outcome=Outcome.PASS, measured=1.0, limit=None, sentence="fine")
        opened.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline=name, checks=(check,)))


def test_processes_and_threads_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    children = [
        processes.Process(target=write_runs, args=(path, f"process-{i}", 10)) for i in range(4)
    ]
    threads = [
        threading.Thread(target=write_runs, args=(path, f"thread-{i}", 10)) for i in range(3)
    ]
    for child in children:  # forked before this process has threads
        child.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    with Store.open(path) as store:
        runs = store.frames.runs()
        assert len(runs) == 7 * 10
        assert set(runs["state"]) == {"judged"}
        assert len(store.frames.checks()) == 7 * 10
        attempts = runs.groupby("board")["attempt"].apply(lambda column: sorted(column))
        assert all(found == list(range(1, 11)) for found in attempts)


def test_a_reader_sees_one_state_while_a_writer_writes(
    store: Store, add_run: Callable[..., str]
) -> None:
    add_run()
    with store.database.reading() as session:
        before = len(session.scalars(sa.select(RunRow.id)).all())
        add_run()  # does not wait for the reader
        again = len(session.scalars(sa.select(RunRow.id)).all())
    assert before == again == 1
    assert len(store.frames.runs()) == 2


def test_rows_that_name_what_is_not_there_are_refused(store: Store, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "results.sqlite") as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with (
        pytest.raises(IntegrityError),
        store.database.writing() as session,
    ):
        session.add(SeriesRow(run_id="no", name="n", path="p", sha256="s", bytes=1))


# Opening


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but a text that is long enough to be looked at\n" * 20)
    with pytest.raises(HarnessError, match=r"notes\.txt.*not a database"):
        Store.open(path)
    assert path.read_text().startswith("not a database")


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE recipes (id INTEGER)")
    with pytest.raises(HarnessError, match="'recipes'"):
        Store.open(path)


def test_a_folder_that_cannot_be_made_is_reported_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="HARNESS_HOME"):
        Store.open(tmp_path / "file" / "results.sqlite")


@pytest.mark.parametrize("url", ["mysql://host/db", "postgresql://:bad port"])
def test_urls_of_no_use_are_refused(url: str) -> None:
    with pytest.raises(HarnessError, match="expected"):
        Store.open(url)


def test_a_password_never_shows_in_a_message() -> None:
    with pytest.raises(HarnessError) as caught:
        Store.open("postgresql://user:geheim@127.0.0.1:1/results")
    assert "geheim" not in str(caught.value)


def test_the_default_store_lies_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    with Store.open() as store:
        assert store.raw_root == tmp_path / "home" / "raw"
    assert (tmp_path / "home" / "results.sqlite").exists()


def test_a_folder_of_raw_files_that_cannot_be_made_is_one_message(store: Store) -> None:
    store.raw_root.write_text("in the way")
    with pytest.raises(HarnessError, match="cannot be made") as caught:
        store.raw_folder("0a1b")
    assert caught.value.where == str(store.raw_root / "0a1b")
