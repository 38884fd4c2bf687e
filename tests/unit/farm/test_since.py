"""What a night says of the one before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.boards.care import EVENT, Care
from harness.compare.planning import planned
from harness.farm.confirming import Ab, settle
from harness.farm.nightly import report
from harness.farm.results import CampaignResult, StageResult
from harness.farm.series import KIND, all_series, tonight
from harness.farm.since import Changes, changes
from harness.statistics.policy import Answer
from harness.store import Store
from harness.store.alerts import Alerts
from harness.verdicts import Outcome, Verdict

STEADY = (10.0, 10.1, 9.9, 10.05, 9.95)


def said(verdict: str, most: float, sentence: str) -> Ab:
    """What an A/B says of the time per token."""
    reached = frozenset({"tpot_end"})
    return Ab({"tpot_s": Answer(verdict, most)}, {"tpot_s": sentence}, "s1", reached)


def shallow(verdict: str) -> Ab:
    """The same, of a depth that a slow board allows."""
    return dataclasses.replace(said(verdict, 0.004, "slow"), reached=frozenset())


WORSE = said("worse", 0.2, "slow")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.sqlite") as opened:
        yield opened


class Nights:
    """Records nights the way a campaign does: `night({"rk": {"tiny": "pass"}})`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.results: dict[str, dict[str, StageResult]] = {}

    def night(
        self,
        boards: dict[str, dict[str, str]],
        *,
        speed: float | None = None,
        kind: str = KIND,
        model: str = "m1",
        parameters: dict[str, int] | None = None,
        build: str = "",
    ) -> str:
        """Each with an engine of its own, unless `build` says otherwise."""
        campaign = self.store.begin_campaign(kind, ["harness", "nightly"], {"boards": list(boards)})
        self.results = {}
        for board, stages in boards.items():
            for stage, text in stages.items():
                for said in text.split(","):
                    self._run(campaign, board, stage, said, speed, model, parameters or {})
        self.store.finish_campaign(campaign, Outcome.PASS)
        Alerts(self.store).record_build(campaign, build or campaign)
        return campaign

    def _run(
        self,
        campaign: str,
        board: str,
        stage: str,
        said: str,
        speed: float | None,
        model: str,
        parameters: dict[str, int],
    ) -> None:
        outcome, _, kind = said.partition(":")
        run = self.store.begin_run(
            campaign_id=campaign, board=board, stage=stage, model_hash=model, parameters=parameters
        )
        details = {}
        if speed is not None and stage == "curve":
            details = {"tokens_per_s_end": speed, "tokens_per_s_start": 2 * STEADY[0]}
        verdict = Verdict(outcome=Outcome(outcome), headline=f"{stage} said so", details=details)
        self.store.finish_run(run, verdict, error_kind=kind or None)
        self.results.setdefault(board, {})[stage] = StageResult(
            board, stage, verdict, run, error_kind=kind or None
        )

    def report(self, campaign: str, *, left: tuple[str, ...] = ()) -> tuple[int, str]:
        told = report(self.store, CampaignResult(campaign, self.results, False, left), 600.0)
        return told.exit_code, "\n".join(told.lines())


@pytest.fixture
def nights(store: Store) -> Nights:
    return Nights(store)


def ask(board: str) -> bool | None:
    raise AssertionError(f"{board} needs no health check")


def told(nights: Nights, before: dict[str, str], now: dict[str, str]) -> Changes:
    nights.night({"rk": before})
    return changes(nights.store, nights.night({"rk": now}))


def test_the_first_night_has_nothing_to_compare_with(nights: Nights) -> None:
    found = changes(nights.store, nights.night({"rk": {"tiny": "pass"}}))
    assert found.since is None
    assert found.lines() == ["no night before this one to compare with"]


def test_a_night_like_the_last_has_changed_nothing(nights: Nights) -> None:
    found = told(nights, {"tiny": "pass", "curve": "warn"}, {"tiny": "pass", "curve": "warn"})
    assert (found.flips, found.shifts) == ((), ())
    assert found.lines()[0].endswith(": nothing")


@pytest.mark.parametrize(
    ("before", "now", "direction"),
    [
        ("pass", "fail", "worse"),
        ("warn", "error:board-lost", "worse"),
        ("fail", "pass", "better"),
        ("error:unreachable", "error:board-lost", "other"),
        ("fail", "error:no-space", "other"),
    ],
)
def test_an_outcome_that_flipped_is_told_with_its_direction(
    before: str, now: str, direction: str, nights: Nights
) -> None:
    (flip,) = told(nights, {"tiny": before}, {"tiny": now}).flips
    assert (flip.board, flip.stage, flip.direction) == ("rk", "tiny", direction)


def test_what_an_earlier_stage_blocked_is_no_change_of_its_own(nights: Nights) -> None:
    found = told(nights, {"tiny": "pass", "curve": "pass"}, {"tiny": "fail", "curve": "blocked"})
    assert [flip.stage for flip in found.flips] == ["tiny"]
    found = told(nights, {"tiny": "fail", "curve": "blocked"}, {"tiny": "pass", "curve": "pass"})
    assert [flip.stage for flip in found.flips] == ["tiny"]


def test_the_last_attempt_is_a_nights_outcome(nights: Nights) -> None:
    found = told(nights, {"stress": "pass"}, {"stress": "error:board-reset,pass"})
    assert found.flips == ()


def test_a_night_that_was_stopped_changes_nothing(nights: Nights) -> None:
    assert told(nights, {"tiny": "pass"}, {"tiny": "invalid:interrupted"}).flips == ()


def test_each_board_is_compared_with_the_last_night_that_it_took_part_in(nights: Nights) -> None:
    nights.night({"a": {"tiny": "pass"}})
    nights.night({"b": {"tiny": "pass"}})  # another timer's
    nights.night({"a": {"tiny": "fail"}}, kind="bringup")  # no night
    found = changes(nights.store, nights.night({"a": {"tiny": "fail"}, "c": {"tiny": "pass"}}))
    assert [(flip.board, flip.before) for flip in found.flips] == [("a", "pass")]
    assert found.new == ("c",)
    assert found.absent == ()


def test_a_board_that_was_not_asked_for_is_told(nights: Nights) -> None:
    nights.night({"a": {"tiny": "pass"}, "b": {"tiny": "pass"}})
    found = changes(nights.store, nights.night({"a": {"tiny": "pass"}}))
    assert found.absent == ("b",)
    assert "not asked tonight: b" in "\n".join(found.lines())


def test_a_suspect_is_told_and_is_a_finding_once_an_ab_confirms_it(nights: Nights) -> None:
    for speed in STEADY:
        nights.night({"rk": {"curve": "pass"}}, speed=speed)
    last = nights.night({"rk": {"curve": "pass"}}, speed=8.5)
    (shift,) = changes(nights.store, last).shifts
    assert (shift.board, shift.metric, shift.worse, shift.nights) == ("rk", "tpot_end", True, 5)
    assert shift.before == pytest.approx(100.0, rel=0.01)  # ms
    code, text = nights.report(last)
    assert code == 0
    assert "suspected: rk curve: time per token at the end of the context 100" in text
    assert "more than the 5 nights before differ by" in text
    night = tonight(nights.store, last)
    settle(night, last, nights.store, lambda *_: WORSE, ask)
    code, text = nights.report(last)
    assert code == 1
    assert "worse, confirmed: rk curve: time per token at the end of the context" in text
    assert "1 worse" in text


def test_a_speed_within_what_nights_differ_by_is_not_told(nights: Nights) -> None:
    for speed in (10.0, 9.2, 10.6, 9.5, 10.3):
        nights.night({"rk": {"curve": "pass"}}, speed=speed)
    last = nights.night({"rk": {"curve": "pass"}}, speed=9.1)
    assert changes(nights.store, last).shifts == ()
    assert nights.report(last)[0] == 0


def test_only_nights_with_the_same_model_and_options_are_compared_in_speed(nights: Nights) -> None:
    for speed in STEADY:
        nights.night({"rk": {"curve": "pass"}}, speed=speed, parameters={"context": 512})
    last = nights.night({"rk": {"curve": "pass"}}, speed=5.0, parameters={"context": 2048})
    found = changes(nights.store, last)
    assert (found.shifts, found.untold) == ((), ("rk",))
    text = "\n".join(found.lines())
    assert "speed not compared, under 5 nights alike before this one: rk" in text


def slow_night(nights: Nights, build: str = "") -> str:
    for speed in STEADY:
        nights.night({"rk": {"curve": "pass"}}, speed=speed, build=build)
    return nights.night({"rk": {"curve": "pass"}}, speed=8.5, build=build)


@pytest.mark.parametrize(
    ("ab", "decided", "right", "said"),
    [
        (WORSE, "confirmed", True, "slow"),
        (said("equivalent", 0.004, "="), "refuted", False, "clears the engine: ="),
        (said("unknown", 0.02, "?"), "refuted", False, "clears the engine: ?"),
        (said("unknown", 0.12, "?"), "undecided", None, "not decided: ?"),
        (shallow("equivalent"), "undecided", None, "less deep in the context"),
        (shallow("worse"), "confirmed", True, "slow"),  # what it blames, it blames at any depth
        (Ab(why="the sources are gone"), "undecided", None, "not decided: the sources are gone"),
    ],
)
def test_every_suspect_is_in_the_ledger_with_how_it_was_decided(
    ab: Ab, decided: str, right: bool | None, said: str, nights: Nights
) -> None:
    last = slow_night(nights)
    settle(tonight(nights.store, last), last, nights.store, lambda *_: ab, ask)
    (alert,) = Alerts(nights.store).all("rk")
    assert (alert.decided, alert.right, alert.metric) == (decided, right, "tpot_end")
    assert said in alert.told
    assert alert.shift == pytest.approx(10 / 8.5 - 1, rel=0.02)
    assert (alert.build, alert.campaign_id) == (last, last)
    (record,) = Alerts(nights.store).records()
    assert record.precision == (None if right is None else float(right))
    settled = Alerts(nights.store).settle(alert.id[:6], not right)
    assert settled.right is not right


def test_one_ab_alone_blames_no_engine(nights: Nights) -> None:
    last = slow_night(nights)
    answers = [WORSE, said("unknown", 0.01, "nothing, the second time")]
    settle(tonight(nights.store, last), last, nights.store, lambda *_: answers.pop(0), ask)
    (alert,) = Alerts(nights.store).all("rk")
    assert answers == []
    assert (alert.decided, alert.right) == ("refuted", False)
    assert "nothing, the second time" in alert.told
    assert nights.report(last)[0] == 0


def test_the_second_ab_may_fail_to_run(nights: Nights) -> None:
    last = slow_night(nights)
    answers = [WORSE, Ab(why="the board was lost")]
    settle(tonight(nights.store, last), last, nights.store, lambda *_: answers.pop(0), ask)
    (alert,) = Alerts(nights.store).all("rk")
    assert (alert.decided, alert.right, alert.search_id) == ("undecided", None, "s1")
    assert "one A/B found it worse (slow), another: the board was lost" in alert.told


def test_the_same_engine_is_never_blamed_and_needs_no_ab(nights: Nights) -> None:
    last = slow_night(nights, build="b" * 64)

    def never(*_: object) -> Ab:
        raise AssertionError("an engine cannot differ from itself")

    settle(tonight(nights.store, last), last, nights.store, never, ask)
    (alert,) = Alerts(nights.store).all("rk")
    assert alert.decided == "board"
    assert nights.report(last)[0] == 0


def test_nights_of_one_engine_tell_how_many_pairs_a_comparison_needs(nights: Nights) -> None:
    assert planned(nights.store, "rk", 0.05, ["tpot_s"]) == {}
    for speed in (*STEADY, *STEADY):
        nights.night({"rk": {"curve": "pass"}}, speed=speed, build="b" * 64)
    plan = planned(nights.store, "rk", 0.05, ["tpot_s", "rss_mb"])
    assert set(plan) == {"tpot_s"}
    assert plan["tpot_s"].enough
    assert plan["tpot_s"].minutes is None  # nobody has timed a pair here


def test_a_segment_ends_with_a_confirmed_change_or_a_declared_event(nights: Nights) -> None:
    last = slow_night(nights)
    settle(tonight(nights.store, last), last, nights.store, lambda *_: WORSE, ask)
    (end,) = [one for one in all_series(nights.store) if one.key.metric == "tpot_end"]
    assert [place for place, _ in end.begins] == [0, 5]
    assert "two A/Bs confirm it" in end.begins[1][1]
    Care(nights.store).note("rk", EVENT, True, "new kernel")
    for speed in (8.5, 8.4):
        nights.night({"rk": {"curve": "pass"}}, speed=speed)
    (end,) = [one for one in all_series(nights.store) if one.key.metric == "tpot_end"]
    assert [place for place, _ in end.begins] == [0, 5, 6]
    assert end.begins[2][1] == "new kernel"


def test_a_finding_goes_before_trouble_in_the_exit_code(nights: Nights) -> None:
    trouble = {"a": {"tiny": "error:unreachable", "curve": "blocked"}}
    assert nights.report(nights.night(trouble))[0] == 2
    both = {**trouble, "b": {"tiny": "fail"}}
    assert nights.report(nights.night(both))[0] == 1
    assert nights.report(nights.night({"a": {"tiny": "pass", "curve": "warn"}}))[0] == 0


def test_the_report_counts_boards_and_names_each_that_is_sick(nights: Nights) -> None:
    night = nights.night(
        {
            "good": {"tiny": "pass", "stress": "error:board-reset,pass"},
            "lost": {"tiny": "error:board-lost", "stress": "blocked"},
            "bad": {"tiny": "fail", "stress": "blocked"},
        }
    )
    _, text = nights.report(night, left=("lost: run 12 in /spool (no answer)",))
    assert "3 boards: 1 passed, 1 with findings, 1 in trouble (10 min)" in text
    assert "passed: good" in text
    assert "good stress: attempt 1 ended in board-reset" in text
    assert "lost tiny ERROR (board-lost): tiny said so" in text
    assert "bad tiny FAIL: tiny said so" in text
    assert "left behind: lost: run 12" in text


def test_a_check_before_and_after_a_stage_is_no_repeated_attempt(nights: Nights) -> None:
    night = nights.night({"a": {"health": "pass,pass", "stress": "error:board-lost,pass"}})
    _, text = nights.report(night)
    assert "a health: attempt" not in text
    assert "a stress: attempt 1 ended in board-lost" in text


def test_what_is_left_behind_is_no_good_night(nights: Nights) -> None:
    night = nights.night({"a": {"tiny": "pass"}})
    assert nights.report(night, left=("a: a run",))[0] == 2
    assert "nothing is left behind" in nights.report(night)[1]
