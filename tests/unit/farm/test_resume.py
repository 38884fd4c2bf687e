"""What is continued after the harness was killed, and what is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from engine.records import Event
from harness.farm.results import ABANDONED, INTERRUPTED
from harness.farm.resume import (
    abandon,
    collected_log,
    continued,
    is_leftover,
    judged,
    mark_stopped,
    orphans,
    unjudged,
    verdict_of,
)
from harness.farm.runner import Resume, _earlier
from harness.store import CampaignRow, Store, options_hash
from harness.verdicts import Check, Outcome, Verdict

OPTIONS = {"boards": ["one"], "model": "abc"}
WANTED = options_hash(OPTIONS)
PASSED = Verdict(
    outcome=Outcome.PASS,
    headline="good",
    checks=(
        Check(name="a", outcome=Outcome.PASS, measured=1.5, limit=2.0, unit="ms", sentence="fast"),
        Check(name="b", outcome=Outcome.PASS, measured="x", limit=None, sentence="same"),
    ),
    details={"prompts": 3},
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def dead_owner() -> str:
    """A process of this machine that has ended, as the store names owners."""
    script = "from harness.store import current_owner; print(current_owner())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    return done.stdout.decode().strip()


def kill_owner(store: Store, campaign: str, owner: str) -> None:
    with store.database.writing() as session:
        session.execute(
            sa.update(CampaignRow).where(CampaignRow.id == campaign).values(owner=owner)
        )


def begin(store: Store, campaign: str, stage: str = "tiny", engine: str = "e1") -> str:
    return store.begin_run(campaign_id=campaign, board="one", stage=stage, engine_hash=engine)


def test_a_judged_stage_is_kept_with_its_whole_verdict(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    run = begin(store, campaign)
    store.finish_run(run, PASSED)
    kept = judged(store, campaign, "one", "tiny", "e1")
    assert kept is not None
    assert (kept.reused, kept.run_id, kept.verdict) == (True, run, PASSED)
    assert verdict_of(store.run(run)) == PASSED


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome.ERROR, "board-lost"),
        (Outcome.BLOCKED, None),
        (Outcome.INVALID, INTERRUPTED),
        (Outcome.INVALID, ABANDONED),
    ],
)
def test_trouble_is_tried_again(store: Store, outcome: Outcome, kind: str | None) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    verdict = Verdict(outcome=outcome, headline="not this time")
    store.finish_run(begin(store, campaign), verdict, error_kind=kind)
    assert judged(store, campaign, "one", "tiny", "e1") is None


def test_a_failure_stays_a_failure(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    store.finish_run(begin(store, campaign), Verdict(outcome=Outcome.FAIL, headline="wrong"))
    kept = judged(store, campaign, "one", "tiny", "e1")
    assert kept is not None
    assert kept.outcome is Outcome.FAIL


def test_a_verdict_about_another_engine_is_not_kept(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    store.finish_run(begin(store, campaign, engine="e1"), PASSED)
    assert judged(store, campaign, "one", "tiny", "e2") is None


def test_the_newest_attempt_decides(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    lost = Verdict(outcome=Outcome.ERROR, headline="lost")
    store.finish_run(begin(store, campaign), lost, error_kind="board-lost")
    store.finish_run(begin(store, campaign), PASSED)
    kept = judged(store, campaign, "one", "tiny", "e1")
    assert kept is not None
    assert (kept.outcome, kept.attempts) == (Outcome.PASS, 2)


def test_a_run_without_a_verdict_is_found_by_its_stage(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    store.finish_run(begin(store, campaign), PASSED)
    run = begin(store, campaign, "stress")
    found = unjudged(store, campaign, "one", "stress", "e1")
    assert found is not None
    assert found.id == run
    assert unjudged(store, campaign, "one", "tiny", "e1") is None


def test_a_run_of_another_engine_is_not_continued(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    begin(store, campaign, "stress", engine="e1")
    assert unjudged(store, campaign, "one", "stress", "e2") is None


def test_the_run_of_the_first_stage_without_a_verdict_is_continued_and_no_other(
    store: Store,
) -> None:
    stages = ["tiny", "accuracy", "stress"]
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    store.finish_run(begin(store, campaign, "tiny"), PASSED)
    begin(store, campaign, "stress")
    # Accuracy comes first, and has no run: it is begun anew, and nothing may run beside it.
    assert continued(store, campaign, "one", stages, "e1") is None
    run = begin(store, campaign, "accuracy")
    found = continued(store, campaign, "one", stages, "e1")
    assert found is not None
    assert found.id == run
    # With another engine, the verdict of tiny counts no more, and it has no run to go on with.
    assert continued(store, campaign, "one", stages, "e2") is None
    store.finish_run(run, Verdict(outcome=Outcome.FAIL, headline="wrong"))
    assert continued(store, campaign, "one", stages, "e1") is None


def test_a_run_that_was_collected_is_judged_from_the_host_alone(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    run = begin(store, campaign)
    events = [
        Event(0, 1, "run-start", {"run_id": run}),
        Event(1, 2, "run-end", {"status": "finished", "reason": ""}),
    ]
    path = store.raw_folder(run) / "events.jsonl"
    path.write_bytes(b"".join(event.to_line() for event in events))
    store.running(run, "/spool", {})
    assert collected_log(store, store.run(run), "e1") is None
    store.collected(run)
    assert collected_log(store, store.run(run), "e2") is None
    log = collected_log(store, store.run(run), "e1")
    assert log is not None
    assert (log.status, len(log.events)) == ("finished", 2)


def test_runs_of_a_dead_harness_are_orphans_and_those_of_a_living_one_are_not(
    store: Store, dead_owner: str
) -> None:
    living = store.begin_campaign("bringup", ["x"], OPTIONS)
    dead = store.begin_campaign("bringup", ["x"], OPTIONS)
    begin(store, living)
    run = begin(store, dead)
    kill_owner(store, dead, dead_owner)
    assert [row.id for row in orphans(store, "one")] == [run]
    assert orphans(store, "one", keep=run) == []
    assert orphans(store, "two") == []


def test_of_the_campaign_that_goes_on_all_runs_are_orphans_but_the_one_that_does(
    store: Store,
) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    old, kept = begin(store, campaign, engine="e0"), begin(store, campaign)
    assert [row.id for row in orphans(store, "one", campaign, keep=kept)] == [old]
    assert [row.id for row in orphans(store, "one", campaign)] == [old, kept]
    store.finish_run(old, PASSED)
    assert orphans(store, "one", campaign, keep=kept) == []


def test_what_lives_on_a_board_is_ours_to_end_only_if_no_other_harness_collects_it(
    store: Store, dead_owner: str
) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    running, judged_run = begin(store, campaign), begin(store, campaign, "stress")
    store.finish_run(judged_run, PASSED)
    assert not is_leftover(store, store.run(running), None)
    assert is_leftover(store, store.run(running), campaign)
    assert is_leftover(store, store.run(judged_run), None)
    kill_owner(store, campaign, dead_owner)
    assert is_leftover(store, store.run(running), None)


def test_runs_of_a_campaign_that_was_given_up_are_orphans(store: Store) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    run = begin(store, campaign)
    store.finish_campaign(campaign, Outcome.INVALID)
    assert [row.id for row in orphans(store, "one")] == [run]


def test_only_the_newest_killed_campaign_is_continued_and_once(
    store: Store, dead_owner: str
) -> None:
    old, new = (store.begin_campaign("bringup", ["x"], OPTIONS) for _ in range(2))
    for campaign in (old, new):
        kill_owner(store, campaign, dead_owner)
    assert _earlier(store, "bringup", WANTED, Resume.CRASHED) == new
    assert store.campaign(old).finished_at is not None
    assert _earlier(store, "bringup", WANTED, Resume.CRASHED) is None


def test_other_options_are_another_campaign(store: Store, dead_owner: str) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    kill_owner(store, campaign, dead_owner)
    assert _earlier(store, "bringup", options_hash({"model": "b"}), Resume.CRASHED) is None
    assert _earlier(store, "stress", WANTED, Resume.CRASHED) is None


@pytest.mark.parametrize(
    ("resume", "continued"),
    [(Resume.CRASHED, False), (Resume.ALSO_STOPPED, True), (Resume.NEVER, False)],
)
def test_a_campaign_that_the_user_stopped_is_continued_only_on_request(
    store: Store, dead_owner: str, resume: Resume, continued: bool
) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    mark_stopped(store, campaign)
    kill_owner(store, campaign, dead_owner)
    assert (_earlier(store, "bringup", WANTED, resume) == campaign) is continued
    assert (store.campaign(campaign).finished_at is None) is continued


def test_a_killed_campaign_is_continued_although_a_run_of_it_was_abandoned_or_stopped(
    store: Store, dead_owner: str
) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    abandon(store, begin(store, campaign))
    stopped = Verdict(outcome=Outcome.INVALID, headline="stopped by the user")
    store.finish_run(begin(store, campaign, "stress"), stopped, error_kind=INTERRUPTED)
    mark_stopped(store, campaign)
    mark_stopped(store, campaign, False)  # continued on request, and then killed
    kill_owner(store, campaign, dead_owner)
    assert judged(store, campaign, "one", "tiny", "e1") is None
    assert _earlier(store, "bringup", WANTED, Resume.CRASHED) == campaign


def test_starting_anew_closes_what_was_left_open(store: Store, dead_owner: str) -> None:
    campaign = store.begin_campaign("bringup", ["x"], OPTIONS)
    kill_owner(store, campaign, dead_owner)
    assert _earlier(store, "bringup", WANTED, Resume.NEVER) is None
    assert store.campaign(campaign).finished_at is not None
