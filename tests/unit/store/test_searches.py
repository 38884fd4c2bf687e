"""Searches and their trials in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.bisect.trials import Result, Trial
from harness.errors import HarnessError
from harness.store import Store
from harness.store.searches import Searches

OPTIONS = {"delta": 0.01, "model": "tiny"}


@pytest.fixture
def searches(tmp_path: Path) -> Searches:
    return Searches(Store.open(tmp_path / "results.sqlite"))


def test_trials_come_back_as_they_were_made_and_in_order(searches: Searches) -> None:
    made = [
        Trial("validate", {"async": "none"}, Result.PASS, seconds=0.5, run="r1"),
        Trial("search", {"prefix": 3}, Result.FAIL, signature="tokens", evidence={"step": 4}),
        Trial("search", {"prefix": 1}, Result.INFRA, value=0.1),
    ]
    search = searches.begin("race", "a-01", ["harness"], OPTIONS)
    other = searches.begin("race", "a-02", ["harness"], OPTIONS)
    for trial in made:
        searches.add(search, trial)
        searches.add(other, made[0])
    assert searches.trials(search) == made


def test_the_same_search_is_continued_until_it_has_an_outcome(searches: Searches) -> None:
    search = searches.begin("race", "a-01", ["harness"], OPTIONS)
    assert searches.interrupted("race", "a-01", OPTIONS) == search
    assert searches.interrupted("race", "a-02", OPTIONS) is None
    assert searches.interrupted("options", "a-01", OPTIONS) is None
    assert searches.interrupted("race", "a-01", {**OPTIONS, "delta": 0.1}) is None
    searches.finish(search, "named", "L00.attn.kv is to blame", culprits=["L00.attn.kv"])
    assert searches.interrupted("race", "a-01", OPTIONS) is None
    row = searches.get(search)
    assert (row.outcome, row.culprits) == ("named", ["L00.attn.kv"])


def test_a_search_is_found_by_the_beginning_of_its_id(searches: Searches) -> None:
    first = searches.begin("race", "a-01", ["harness"], OPTIONS)
    last = searches.begin("options", "a-01", ["harness"], OPTIONS)
    assert searches.find(first[:12]).id == first
    assert searches.find("last").id == last
    assert [row.id for row in searches.newest()] == [last, first]
    assert [row.id for row in searches.newest("race")] == [first]
    for unknown in ("", "nothing"):
        with pytest.raises(HarnessError, match="no search"):
            searches.find(unknown)
