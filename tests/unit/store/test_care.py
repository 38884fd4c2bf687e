"""Quarantine and journal of boards, in a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.boards.care import HEALTH, POWER, Care, this_person
from harness.errors import BoardError
from harness.store import Store


def test_quarantine_outlives_the_harness_that_set_it(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    with Store.open(path) as store:
        Care(store).quarantine("rk-01", "it does not boot")
    with Store.open(path) as store:
        found = Care(store).quarantined("rk-01")
        assert found is not None
        assert (found.reason, found.automatic) == ("it does not boot", True)
        assert Care(store).quarantined("rk-02") is None


def test_a_board_that_is_set_aside_is_refused_with_reason_and_remedy(store: Store) -> None:
    care = Care(store)
    care.require_admitted("rk-01")
    care.quarantine("rk-01", "its fan is loose", "ann@lab")
    with pytest.raises(BoardError, match="by ann@lab: its fan is loose") as caught:
        care.require_admitted("rk-01")
    assert caught.value.kind == "quarantined"
    assert "harness boards health rk-01" in caught.value.remedy
    care.require_admitted("rk-02")


def test_the_first_reason_stays_unless_a_person_gives_another(store: Store) -> None:
    care = Care(store)
    care.quarantine("rk-01", "it was lost")
    assert care.quarantine("rk-01", "it was lost again").reason == "it was lost"
    by_person = care.quarantine("rk-01", "on the bench", "ann@lab")
    assert (by_person.reason, by_person.automatic) == ("on the bench", False)
    assert care.quarantine("rk-01", "it was lost").by == "ann@lab"


def test_a_release_says_what_it_was_for_and_a_second_one_is_nothing(store: Store) -> None:
    care = Care(store)
    care.quarantine("rk-01", "it was lost")
    was = care.release("rk-01", "passed a health check")
    assert was is not None
    assert was.reason == "it was lost"
    assert care.release("rk-01", "again") is None
    care.require_admitted("rk-01")
    assert [(event.kind, event.told) for event in care.events("rk-01")] == [
        ("release", "passed a health check"),
        ("quarantine", "by the harness: it was lost"),
    ]


def test_the_journal_is_told_newest_first_by_board_and_kind(store: Store) -> None:
    care = Care(store)
    for number in range(4):
        care.note("rk-01", POWER, number % 2 == 0, f"cycle {number}")
    care.note("rk-01", HEALTH, True, "pass")
    care.note("rk-02", HEALTH, False, "fail")
    assert [event.told for event in care.events("rk-01", limit=2)] == ["pass", "cycle 3"]
    assert [event.told for event in care.events("rk-01", kind=POWER, limit=1)] == ["cycle 3"]
    assert [event.good for event in care.events("rk-02")] == [False]


def test_a_person_is_named_by_user_and_host() -> None:
    user, _, host = this_person().partition("@")
    assert user and host and ":" not in host


def test_the_last_boot_id_is_that_of_the_last_probe(store: Store) -> None:
    assert Care(store).last_boot_id("rk-01") is None
    store.record_board("rk-01", boot_id="a-b-c")
    assert Care(store).last_boot_id("rk-01") == "a-b-c"
