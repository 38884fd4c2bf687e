"""The page of a search, from the store to the file."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dashboards.pages.bisect import strip
from dashboards.reading import load, stamp
from dashboards.search_details import command_of, notes_of, posterior_of, tried
from dashboards.searches import Trial as Shown
from dashboards.site import write_site
from harness.bisect.trials import Result, Trial
from harness.store import Store
from harness.store.searches import Searches

HOSTILE = "<script>document.title='owned'</script>\u202e"


def record(store: Store, *, finish: bool = True) -> str:
    searches = Searches(store)
    found = searches.begin("options", "rk-01", ["harness", "bisect", "options"], {"model": "x"})
    for number in range(6):
        result = Result.FAIL if number % 2 else Result.PASS
        on = ["unit", "kv_layout", "kv"][: number % 4]
        trial = Trial("prefix", {"on": on}, result, HOSTILE, value=0.1 * number, seconds=2.0)
        searches.add(found, trial)
    searches.add(found, Trial("without", {"on": []}, Result.INFRA, "board-lost"))
    if finish:
        searches.finish(
            found,
            "named",
            f"kv makes it fail {HOSTILE}",
            culprits=["kv"],
            confidence=0.995,
            details={
                "posterior": [
                    {"name": "unit", "probability": 0.001},
                    {"name": "kv_layout", "probability": 0.004},
                    {"name": "kv", "probability": 0.995},
                ],
                "command": "harness align --board rk-01 --kv f16",
                "notes": ["`kv` needs `kv_layout`"],
                "ranking": {
                    "effects": [{"name": "kv", "mean": 0.3, "left_out": 0.3, "alone": 0.3}]
                },
            },
        )
    return found


class Reader(HTMLParser):
    """The tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def built(store: Store, folder: Path, search: str) -> Reader:
    write_site(load(store), folder / "site")
    return Reader((folder / "site" / "searches" / f"{search}.html").read_text())


def test_a_named_culprit_its_trials_and_its_posterior_are_on_the_page(
    store: Store, tmp_path: Path
) -> None:
    search = record(store)
    page = built(store, tmp_path, search)
    words = " ".join(" ".join(page.words).split())
    assert "kv makes it fail" in words
    assert "harness align --board rk-01 --kv f16" in words
    assert "harness bisect options" in words
    bars = [attributes["class"] for tag, attributes in page.tags if tag == "rect"]
    assert bars.count("bar t-fail") == bars.count("bar t-pass") == 3
    assert bars.count("bar t-infra") == 1
    assert bars.count("bar s2") >= 1  # what is named stands out
    rows = sum(tag == "tr" for tag, _ in page.tags)
    assert rows >= 7 + 3 + 1 + 3  # every chart has its numbers as a table
    farm = (tmp_path / "site" / "index.html").read_text()
    assert f"searches/{search}.html" in farm


def test_what_a_board_says_in_a_search_is_text(store: Store, tmp_path: Path) -> None:
    page = built(store, tmp_path, record(store))
    assert sum(tag == "script" for tag, _ in page.tags) == 1  # the site's own
    text = (tmp_path / "site" / "index.html").read_text() + "".join(page.words)
    assert "\u202e" not in text


def test_a_search_without_an_outcome_says_that_it_goes_on(store: Store, tmp_path: Path) -> None:
    before = stamp(store)
    search = record(store, finish=False)
    assert stamp(store) != before
    page = built(store, tmp_path, search)
    assert "No outcome yet" in " ".join(page.words)


@pytest.mark.parametrize(
    "told",
    [None, {}, "x", [1], [{"name": "a"}], [{"probability": "x"}], [{"probability": float("nan")}]],
)
def test_details_of_another_shape_are_left_out(told: Any) -> None:
    assert posterior_of({"posterior": told}) == []


def test_races_and_revisions_are_read_in_their_own_words() -> None:
    race = {"races": [{"sentence": "no event between a and b", "command": "harness bisect race"}]}
    assert command_of(race) == "harness bisect race"
    assert notes_of({**race, "findings": ["an edge is missing"], "notes": [3]}) == (
        "an edge is missing",
        "no event between a and b",
    )
    commits = [{"short": f"c{n}", "subject": f"change {n}"} for n in range(4)]
    levels = [{"revisions": commits, "posterior": {"1": 0.1, "3": 0.9}}]
    assert posterior_of({"levels": levels}) == [
        ("c1 change 1", 0.1),
        ("c2 change 2", 0.0),
        ("c3 change 3", 0.9),
    ]
    assert tried({"on": {"only": ["a", "b"]}, "delayed": {"only": []}}) == "a, b"
    assert tried({"on": {"all_but": ["a"]}, "delayed": ["x"]}) == "all but a; held back: x"
    assert tried({"revision": "0123456789abcdef", "build": "x"}) == "revision 0123456789ab"
    assert tried({"on": 3}) == ""


def test_a_long_search_stays_inside_its_drawing() -> None:
    trials = [
        Shown(n, f"phase {n % 3}", {"steps": ["a"]}, ("fail", "pass")[n % 2], "", None, None)
        for n in range(1, 1601)
    ]
    chart = strip(trials, 2000)
    (panel,) = chart.panels
    assert "the first 1600 of 2000" in chart.summary
    assert all(
        chart.left - 1 <= bar.x and bar.x + bar.width <= chart.right + 1 for bar in panel.bars
    )
    assert all(panel.top <= bar.y and bar.y + bar.height <= panel.bottom for bar in panel.bars)
