"""Crashes of runs: one group for a signature, over all boards."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import HarnessError
from harness.store import Store
from harness.store.crashes import Crashes, note_of
from harness.verdicts import CrashNote, Outcome, Verdict


def note(hash_: str = "a" * 16, **changes: str) -> CrashNote:
    return CrashNote(
        **{
            "name": "illegal-instruction",
            "signature": "illegal-instruction | SIGILL ILL_ILLOPC | L00.attn.q | - | sdot",
            "hash": hash_,
            "finer": "b" * 16,
            "headline": "sdot in int8_DN_Q4 needs dotprod, which the cores lack",
            "sentence": "the cores have no asimddp",
            "remedy": "run the neon kernels there",
            "op": "L00.attn.q",
            "facts": (("instruction", "sdot v0.4s, v4.16b, v2.16b"),),
            **changes,
        }
    )


@pytest.fixture
def crash(store: Store) -> Callable[..., str]:
    """`crash(board, hash)`: a run that ended so."""
    campaign = store.begin_campaign("bringup", ["harness", "bringup"], {})

    def add(board: str, found: CrashNote | None) -> str:
        run_id = store.begin_run(campaign_id=campaign, board=board, stage="accuracy")
        store.finish_run(run_id, Verdict(outcome=Outcome.FAIL, headline="it died", crash=found))
        return run_id

    return add


def test_the_same_signature_on_several_boards_is_one_crash(
    store: Store, crash: Callable[..., str]
) -> None:
    runs = [crash("a53-1", note()), crash("a53-2", note()), crash("a53-1", note())]
    other = crash("rk-1", note("c" * 16, name="killed"))
    groups = {group.hash: group for group in Crashes(store).groups()}
    assert set(groups) == {"a" * 16, "c" * 16}
    same = groups["a" * 16]
    assert (same.count, same.boards) == (3, ("a53-1", "a53-2"))
    assert set(same.runs) == set(runs)
    assert same.first_seen <= same.last_seen
    assert groups["c" * 16].runs == (other,)
    assert [group.count for group in Crashes(store).groups("a53-1")] == [2]


def test_a_run_that_is_judged_again_has_the_crash_of_its_new_verdict(
    store: Store, crash: Callable[..., str]
) -> None:
    crashes, run_id = Crashes(store), crash("a53-1", note())
    row = crashes.of_run(run_id)
    assert row is not None and note_of(row) == note()
    crashes.keep_reproducer(run_id, {"rate": "5 of 5"})
    store.finish_run(run_id, Verdict(outcome=Outcome.FAIL, headline="", crash=note()))
    same = crashes.of_run(run_id)
    assert same is not None and same.reproducer == {"rate": "5 of 5"}
    store.finish_run(run_id, Verdict(outcome=Outcome.FAIL, headline="", crash=note("d" * 16)))
    changed = crashes.of_run(run_id)
    assert changed is not None and (changed.hash, changed.reproducer) == ("d" * 16, None)
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline=""))
    assert crashes.of_run(run_id) is None


def test_a_group_is_found_by_the_start_of_its_hash_alone(
    store: Store, crash: Callable[..., str]
) -> None:
    crash("a", note("ab" + "0" * 14))
    crash("a", note("ac" + "0" * 14))
    assert Crashes(store).group("ab").hash.startswith("ab")
    with pytest.raises(HarnessError, match="more than one"):
        Crashes(store).group("a")
    with pytest.raises(HarnessError, match="no crash 'x'"):
        Crashes(store).group("x")


def test_the_command_lists_and_explains_what_was_stored(
    store: Store, crash: Callable[..., str]
) -> None:
    run_id, well = crash("a53-1", note(sentence="a \x1b[31m red board")), crash("a53-1", None)
    run, file = CliRunner().invoke, ["--store", store.database.label]
    listed = run(app, ["triage", "--json", *file])
    assert listed.exit_code == 0
    (group,) = json.loads(listed.stdout)
    assert (group["boards"], group["count"], group["class"]) == (
        ["a53-1"], 1, "illegal-instruction"
    )  # fmt: skip
    for word in (run_id[:8], "last", "a" * 8):
        told = run(app, ["triage", word, *file])
        assert told.exit_code == 1
        assert "Illegal instruction: sdot in int8_DN_Q4" in told.stdout
        assert "\x1b" not in told.stdout
        assert f"harness triage {run_id[:8]} --minimise" in told.stdout
    clean = run(app, ["triage", well, *file])
    assert (clean.exit_code, "no crash" in clean.stdout) == (0, True)


@pytest.mark.parametrize(
    "words",
    [["--minimise"], ["last", "--asan", "--minimise"], ["nothing"], ["last", "--again", "0"]],
)
def test_wrong_use_is_told_with_status_2(
    words: list[str], store: Store, crash: Callable[..., str]
) -> None:
    crash("a53-1", note())
    told = CliRunner().invoke(app, ["triage", *words, "--store", store.database.label])
    assert told.exit_code == 2
    assert told.stderr
