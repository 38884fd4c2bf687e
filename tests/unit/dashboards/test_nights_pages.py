"""History, Board health and Compare, from the store to the files."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from dashboards.reading import load, stamp
from dashboards.site import write_site
from harness.boards.care import EVENT, HEALTH, Care
from harness.boards.leases import Leases
from harness.farm.series import KIND, all_series
from harness.store import Store
from harness.store.alerts import Alert, Alerts
from harness.store.models import BoardEventRow, CampaignRow
from harness.store.searches import Searches
from harness.verdicts import Outcome, Verdict

HOSTILE = "<script>document.title='owned'</script>\u202e"
BOARD = "rk-01"
FIRST = datetime.datetime(2026, 3, 1, 2, 0, tzinfo=datetime.UTC)


def at_night(store: Store, night: int, kind: type[CampaignRow], name: str, column: str) -> None:
    """Moves what was recorded now to the night's own time."""
    when = FIRST + datetime.timedelta(days=night)
    with store.database.writing() as session:
        session.execute(sa.update(kind).where(kind.id == name).values({column: when}))


def record_nights(store: Store, count: int = 14) -> list[str]:
    """Steady nights, a confirmed slowdown on the tenth; returns the campaigns."""
    rng = np.random.default_rng(1)
    store.record_board(BOARD, host="10.0.0.1", virtual=False, tags=[])
    campaigns = []
    for night in range(count):
        campaign = store.begin_campaign(KIND, ["harness", "nightly"], {"night": night})
        speed = float(20 * np.exp(rng.normal(0, 0.01))) * (0.9 if night >= 10 else 1)
        run = store.begin_run(
            campaign_id=campaign, board=BOARD, stage="curve", model_hash="m" * 64,
            model_name="small", scheme="q8", parameters={"context": 512},
        )  # fmt: skip
        details = {
            "tokens_per_s_start": 2 * speed,
            "tokens_per_s_end": speed,
            "ttft_s": 1 / speed,
            "rss_peak_mb": 300.0,
        }
        store.finish_run(run, Verdict(outcome=Outcome.PASS, headline="fast", details=details))
        store.finish_campaign(campaign, Outcome.PASS)
        Alerts(store).record_build(campaign, f"{night // 2:064x}")
        at_night(store, night, CampaignRow, campaign, "started_at")
        campaigns.append(campaign)
    end = next(one for one in all_series(store) if one.key.metric == "tpot_end")
    point = end.points[10]
    Alerts(store).add(
        Alert("screen", BOARD, "curve", "tpot_end", end.key.hash, point.campaign_id, point.run_id,
              point.at, 50.0, 55.0, 0.1, 0.001, 10, "a" * 64, "b" * 64, "confirmed",
              f"an A/B confirms it: {HOSTILE}", None, True)
    )  # fmt: skip
    return campaigns


def record_comparison(store: Store) -> str:
    searches = Searches(store)
    found = searches.begin("compare", BOARD, ["harness", "compare", "kv=f16", "kv=int8"], {})
    one = {"verdict": "worse", "ratio": 1.04, "low": 1.02, "high": 1.06, "p": 0.002}
    pairs = [
        {"a": {"tpot_s": 0.05, "rss_mb": 300}, "b": {"tpot_s": 0.052 + n / 1e5, "rss_mb": 300}}
        for n in range(10)
    ]
    searches.finish(
        found,
        "worse",
        f"time per token: B is worse than A {HOSTILE}",
        details={
            "arms": {"A": {"title": "kv=f16"}, "B": {"title": f"kv=int8 {HOSTILE}"}},
            "metrics": {"tpot_s": one, "rss_mb": {**one, "verdict": "unknown", "low": None}},
            "deciding": ["tpot_s"],
            "difference": [["option kv", "f16", "int8"], ["broken"]],
            "clocks": {"state": "valid", "reason": "A ran at 1800 MHz"},
            "noise": {"tpot_s": 0.01},
            "plan": {"tpot_s": {"sentence": "2.0% on this board needs 10 pairs, 14 minutes"}},
            "pairs": [*pairs, "broken"],
        },
    )
    return found


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Nights, a journal, a ledger and a comparison. Not to be written to."""
    with Store.open(tmp_path_factory.mktemp("noted") / "results.sqlite") as store:
        record_all(store)
        yield store


@pytest.fixture(scope="module")
def site(noted: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nights") / "site"
    write_site(load(noted), folder)
    return folder


def record_all(store: Store) -> None:
    record_nights(store)
    care = Care(store)
    care.note(BOARD, HEALTH, True, f"pass: it computes right {HOSTILE}")
    care.note(BOARD, EVENT, True, "new kernel")
    with store.database.writing() as session:
        session.execute(
            sa.update(BoardEventRow)
            .where(BoardEventRow.kind == EVENT)
            .values(at=FIRST + datetime.timedelta(days=4.5))
        )
    Leases(store).acquire(BOARD, "ann@desk", "trying a fan", 600)
    record_comparison(store)


def text_of(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())


def test_a_history_shows_nights_segments_and_the_band_of_each(site: Path) -> None:
    page = site / "boards" / "rk-01--small--q8" / "history.html"
    html, words = page.read_text(), text_of(page)
    assert "Time per token at the end of the context" in words
    assert "a night scatters by" in words.lower()
    assert "new kernel" in words
    assert "an A/B confirms it" in words
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


def test_the_site_is_built_anew_when_a_journal_or_the_ledger_changes(store: Store) -> None:
    record_nights(store, 11)
    seen = stamp(store)
    Care(store).note(BOARD, EVENT, True, "fans replaced")
    noted = stamp(store)
    assert noted != seen
    Alerts(store).settle(Alerts(store).all()[0].id, False)
    assert stamp(store) != noted


def test_a_store_without_nights_has_no_history_and_still_a_site(
    store: Store, tmp_path: Path
) -> None:
    write_site(load(store), tmp_path / "site")
    assert not (tmp_path / "site" / "health.html").exists()
