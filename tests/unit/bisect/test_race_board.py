"""Trials of the search for a race: what a run on a board tells, whatever its end."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.records import Event
from harness.bisect.race import Race, RaceSearch, Verdict
from harness.bisect.race_board import (
    AHEAD,
    BATCH_S,
    Decode,
    RaceBoard,
    Told,
    Unstable,
    ahead,
    as_trial,
    from_trial,
    replay,
    retrace,
)
from harness.bisect.race_words import missing_edge, reproducing, sentence
from harness.bisect.sets import Configuration, Question
from harness.bisect.trials import Result, Trial
from harness.errors import BoardError, HarnessError
from harness.jobs.runlog import RunLog

STEPS = ("a", "b", "c", "d")
DECODE = Decode([1, 2], steps=4, context=16, delay_s=0.003)
REFERENCE = {"fed": [[1, 2]], "hashes": ["x"]}
Make = Callable[..., RaceBoard]


def question(*on: str, repeats: int = 2, delayed: Sequence[str] = ()) -> Question:
    return Question(Configuration(frozenset(on), frozenset(delayed)), repeats, "sets")


def trial(number: int, result: str = "pass", **more: Any) -> tuple[str, Mapping[str, Any]]:
    value = {"question": number, "repeat": 0, "result": result, "seconds": 0.01, **more}
    return "data", {"name": "trial", "value": value}


REFERRED = ("data", {"name": "reference", "value": REFERENCE})
BEGUN = ("data", {"name": "steps", "value": {"parts": {}, "findings": []}})
STARTED = (REFERRED, BEGUN)


@pytest.fixture
def board(tmp_path: Path) -> Make:
    """`board(events, status)`: one whose runs tell these events and end so, or raise an error."""

    def make(
        *runs: tuple[Sequence[tuple[str, Mapping[str, Any]]], str] | BoardError,
    ) -> RaceBoard:
        coming = iter(runs)
        sent: list[Mapping[str, Any]] = []

        def attempt(job: str, parameters: Mapping[str, Any], *, timeout_s: float) -> RunLog:
            assert job == "race"
            assert timeout_s > 0
            sent.append(parameters)
            found = next(coming)
            if isinstance(found, BoardError):
                raise found
            events = [Event(n, n, kind, data) for n, (kind, data) in enumerate(found[0])]
            return RunLog("run-1", events, tmp_path, found[1], "a reason")

        session: Any = types.SimpleNamespace(
            attempt=attempt, deployed=types.SimpleNamespace(board=types.SimpleNamespace(name="v"))
        )
        made = RaceBoard(session, DECODE, STEPS)
        made.sent = sent  # type: ignore[attr-defined]  # for the tests below
        return made

    return make


def results(made: RaceBoard, wanted: Question, count: int, *more: Question) -> list[str]:
    told = [made.ask(wanted.configuration, lambda: iter([wanted, *more])) for _ in range(count)]
    return [item.signature or item.result.value for item in told]


def test_a_run_makes_the_trials_of_several_questions_which_are_given_when_asked(
    board: Make,
) -> None:
    one, other = question("a"), question(*STEPS)
    told = [*STARTED, trial(0), trial(0), trial(1, "fail", signature="wrong numbers", step=2)]
    made = board((told, "finished"))
    assert results(made, one, 2, other) == ["pass", "pass"]
    assert results(made, other, 1) == ["wrong numbers"]
    assert made.runs == 1
    (sent,) = made.sent  # type: ignore[attr-defined]
    assert [item["on"] for item in sent["questions"]] == [["a"], "all"]
    assert sent["reference"] is None


def test_later_runs_are_given_the_reference_of_the_first(board: Make) -> None:
    made = board(([*STARTED, trial(0)], "finished"), ([trial(0)], "finished"))
    results(made, question("a", repeats=1), 2)
    assert made.sent[1]["reference"] == REFERENCE  # type: ignore[attr-defined]


def test_an_engine_that_dies_fails_the_trial_it_was_in(board: Make) -> None:
    death = ("engine-exit", {"attempt": 0, "planned": False, "signal": 11})
    one, other = question("a"), question("b")
    first = board(([*STARTED, trial(0), death], "failed"))
    assert results(first, one, 2, other) == ["pass", "died by SIGSEGV"]
    behind = board(([*STARTED, trial(0), trial(0), death], "failed"))
    assert results(behind, one, 2, other) == ["pass", "pass"]
    assert results(behind, other, 1) == ["died by SIGSEGV"]
    failed = board(([*STARTED, trial(0, "fail", signature="x"), death], "failed"))
    assert results(failed, one, 1, other) == ["x"]
    assert results(failed, other, 1) == ["died by SIGSEGV"]


def test_an_engine_that_hangs_or_says_why_it_stops_has_that_as_its_signature(
    board: Make,
) -> None:
    stuck = ("error", {"kind": "ExecutorStuck", "message": "no op ended"})
    assert results(board(([*STARTED, stuck], "failed")), question("a"), 1) == ["ExecutorStuck"]
    assert results(board(([*STARTED], "hung")), question("a"), 1) == ["hangs"]


def test_a_lost_board_is_no_failure_and_what_it_told_before_counts(board: Make) -> None:
    lost = BoardError("v", "unreachable", "no answer")
    made = board(
        lost, ([*STARTED, trial(0)], "board-reset"), ([], "lost"), ([trial(0)], "finished")
    )
    told = results(made, question("a"), 4)
    assert told == ["unreachable", "pass", "board-lost", "pass"]
    assert made.runs == 3


def test_an_engine_that_can_make_no_trial_is_told_as_it_says(board: Make) -> None:
    error = ("error", {"kind": "OverBudget", "message": "the model does not fit"})
    with pytest.raises(HarnessError, match="the model does not fit"):
        results(board(([error], "failed")), question("a"), 1)
    typo = ("error", {"kind": "ValueError", "message": "ENGINE_FAULT: no op 'L09.x'"})
    with pytest.raises(HarnessError, match="no op 'L09"):
        results(board(([REFERRED, typo], "failed")), question("a"), 1)
    unstable = ("data", {"name": "unstable", "value": "3 decodes gave 3 results"})
    with pytest.raises(Unstable, match="3 results"):
        results(board(([unstable], "finished")), question("a"), 1)


def test_a_run_is_given_as_much_as_fits_into_it(board: Make) -> None:
    slow = question(*STEPS, repeats=5000, delayed=STEPS)
    made = board(([*STARTED, trial(0)], "finished"))
    results(made, slow, 1, *[question("a")] * 40)
    (sent,) = made.sent  # type: ignore[attr-defined]
    seconds = 0.05 + 4 * 4 * 0.003
    assert sent["questions"][0]["repeats"] == int(BATCH_S / seconds)
    assert len(sent["questions"]) <= AHEAD


def test_what_may_follow_is_asked_ahead_for_either_result() -> None:
    def make() -> RaceSearch:
        return RaceSearch([f"s{n}" for n in range(64)], delays=False)

    told = [Told(Result.FAIL, "x", None)] * 3 + [Told(Result.PASS, None, None)] * 2
    coming = ahead(make, told)
    standing, after_pass, after_fail = (next(coming) for _ in range(3))
    assert standing == replay(make, told).ask()
    passed = [*told, *[Told(Result.PASS, None, None)] * standing.repeats]
    assert after_pass == replay(make, passed).ask()
    assert after_fail == replay(make, [*told, Told(Result.FAIL, "x", None)]).ask()


def test_a_search_goes_on_with_its_trials_and_refuses_those_of_another_one() -> None:
    search = RaceSearch(STEPS)
    kept = []
    for result in (Result.FAIL, Result.INFRA, Result.PASS):
        asked = search.ask()
        assert isinstance(asked, Question)
        kept.append(as_trial(asked, STEPS, Told(result, None, "r")))
        search.tell(result)
    assert retrace(RaceSearch(STEPS), kept, STEPS).ask() == search.ask()
    odd = dataclasses.replace(kept[2], subject={"on": {"only": ["b"]}, "delayed": {"only": []}})
    with pytest.raises(HarnessError, match=r"trial 2 .* --fresh"):
        retrace(RaceSearch(STEPS), [*kept[:2], odd], STEPS)


def test_nothing_follows_the_end_of_a_search() -> None:
    def search() -> RaceSearch:
        return RaceSearch(["a"], findings=["an edge is missing"])

    assert list(ahead(search, [])) == []
    assert isinstance(replay(search, []).ask(), Verdict)


def test_a_stored_trial_tells_again_what_it_told() -> None:
    told = Told(Result.FAIL, "wrong numbers", "run-1", 0.5, {"step": 3})
    stored = as_trial(question("a", "b", "c", delayed=["b"]), STEPS, told)
    assert stored.subject == {"on": {"all_but": ["d"]}, "delayed": {"only": ["b"]}}
    assert from_trial(stored) == told


PARTS = {"a": "matrix", "b": "vector", "c": "vector"}


def failed_alone(*steps: str, overlaps: Any) -> Trial:
    told = Told(Result.FAIL, "wrong numbers", "r", evidence={"overlaps": overlaps})
    return as_trial(question(*steps), STEPS, told)


def overlap(first: str, second: str, hazard: str = "RAW", **more: str) -> dict[str, str]:
    return {"first": first, "second": second, "hazard": hazard, "buffer": "x", "as": "x", **more}


@pytest.mark.parametrize(
    ("overlaps", "words"),
    [
        (
            [overlap("a", "b")],
            "`a` completes after `b` starts, which reads `x`: "
            "no event between matrix and vector queue",
        ),
        (
            [overlap("c", "b"), overlap("a", "b", "WAR", **{"as": "y"})],
            "`a` completes after `b` starts, which overwrites `x` (`y` lies in the same memory): "
            "no event between matrix and vector queue",
        ),
        ([], "without declaring it"),
        (["nonsense", {"first": 3}, None], "without declaring it"),
    ],
)
def test_the_missing_edge_in_words(overlaps: Any, words: str) -> None:
    race = Race(("a",), (), 0.99, (3, 5), (0, 20))
    trials = [failed_alone("a", overlaps=overlaps), failed_alone("b", overlaps=[overlap("b", "c")])]
    assert words in missing_edge(race, trials, PARTS)


def test_two_ops_of_one_queue_are_told_as_such() -> None:
    race = Race(("b",), ("b",), 0.99, (3, 5), (0, 20))
    told = sentence(race, [failed_alone("b", overlaps=[overlap("b", "c")])], PARTS)
    assert "both belong on the vector queue" in told
    assert "with `b` held back, `b` failed in 3 of 5 trials; all others without it, 0 of 20" in told


def test_the_command_to_see_it_again_is_quoted_and_makes_enough_trials() -> None:
    race = Race(("a", "b"), ("a",), 0.99, (3, 60), (0, 20))
    told = reproducing(race, ["--board", "v", "--model", "a b.gguf"], STEPS)
    assert told == (
        "harness bisect race --board v --model 'a b.gguf' --try a,b --held-back a --trials 60"
    )
    late = Race(("a",), STEPS, 0.99, (3, 3), (0, 20))
    assert reproducing(late, [], STEPS).endswith("--try a --held-back all --trials 10")
