"""History, Board health and Compare, from the store to the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.reading import load, stamp
from dashboards.site import write_site
from harness.boards.care import EVENT, Care
from harness.store import Store
from harness.store.alerts import Alerts
from harness.store.searches import Searches


@pytest.fixture(scope="module")
def noted(sample: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Nights, a journal, a ledger and a comparison. Not to be written to."""
    with Store.open(tmp_path_factory.mktemp("noted") / "results.sqlite") as store:
        sample.record_noted_nights(store)
        yield store


@pytest.fixture(scope="module")
def site(noted: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nights") / "site"
    write_site(load(noted), folder)
    return folder


def text_of(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())


def test_a_history_shows_nights_segments_and_the_band_of_each(site: Path) -> None:
    page = site / "boards" / "rk-01--small--q8" / "history.html"
    html, words = page.read_text(), text_of(page)
    assert "Time per token at the end of the context" in words
    assert "a night scatters by" in words.lower()
    assert "new kernel" in words
    assert "two A/Bs confirm it" in words
    end = html[html.index("at the end of the context") :]
    end = end[: end.index("</svg>", end.index('role="img"'))]
    assert end.count('class="band floor"') >= 3  # before the event, after it, after the change
    assert end.count('class="dot s1"') >= 14
    assert "2026-03-11: " in end
    rows = re.findall(r"<tr><td>2026-03-\d\d</td>", html)
    assert len(rows) == 4 * 14  # each chart has its numbers as a table
    assert f'href="../../boards/{page.parent.name}/index.html"' in html
    bringup = (page.parent / "index.html").read_text()
    assert "history.html" in bringup


def test_board_health_tells_check_noise_holder_journal_and_ledger(site: Path) -> None:
    words = text_of(site / "health" / "rk-01.html")
    assert "pass: it computes right" in words
    assert "Held by ann@desk: trying a fan" in words
    assert "new kernel" in words
    assert "Suspects of nights, and what became of them" in words
    assert "harness compare . . --board rk-01" in words
    assert "The smallest change that shows" in words
    farm = text_of(site / "health.html")
    assert "rk-01" in farm
    assert "How often detectors were right" in farm
    assert 'href="health.html"' in (site / "index.html").read_text()


def test_a_comparison_shows_verdict_interval_band_and_what_differs(
    site: Path, noted: Store
) -> None:
    search = Searches(noted).newest("compare")[0].id
    page = site / "searches" / f"{search}.html"
    html, words = page.read_text(), text_of(page)
    assert "B is worse than A" in words
    assert "+4.0 %" in words
    assert "\u2013 … +6.0 %" in words  # an interval that is open to one side
    assert html.count('class="bar aa"') == 1  # one metric's noise is known
    assert "option kv" in words
    assert "2.0% on this board needs 10 pairs, 14 minutes" in words
    assert "harness compare kv=f16 kv=int8" in words
    assert html.count('class="dot s1"') >= 2 + 20


def test_nothing_of_a_board_is_markup_and_the_pages_need_no_script(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text()
        assert "<script>document" not in html
        assert "\u202e" not in html
        assert " onclick" not in html
        # A report is one file for a mail: its style is in it, and its policy names that by hash.
        assert "<style" not in html or page.stem == "report"


def test_the_site_is_built_anew_when_a_journal_or_the_ledger_changes(
    sample: Any, store: Store
) -> None:
    sample.record_nights(store, 11)
    seen = stamp(store)
    Care(store).note(sample.NIGHT_BOARD, EVENT, True, "fans replaced")
    noted = stamp(store)
    assert noted != seen
    Alerts(store).settle(Alerts(store).all()[0].id, False)
    assert stamp(store) != noted


def test_a_store_without_nights_has_no_history_and_still_a_site(
    store: Store, tmp_path: Path
) -> None:
    write_site(load(store), tmp_path / "site")
    assert not (tmp_path / "site" / "health.html").exists()
