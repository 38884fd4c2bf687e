"""Nights of one board with all that is kept about them: a ledger, a journal, a comparison."""

from __future__ import annotations

import datetime

import numpy as np
import sqlalchemy as sa

from harness.boards.care import EVENT, HEALTH, Care
from harness.boards.leases import Leases
from harness.farm.series import KIND, all_series
from harness.store import Store
from harness.store.alerts import Alert, Alerts
from harness.store.models import BoardEventRow, CampaignRow
from harness.store.searches import Searches
from harness.verdicts import Outcome, Verdict

HOSTILE_WORDS = "<script>document.title='owned'</script>\u202e"
NIGHT_BOARD = "rk-01"
FIRST = datetime.datetime(2026, 3, 1, 2, 0, tzinfo=datetime.UTC)


def at_night(store: Store, night: int, kind: type[CampaignRow], name: str, column: str) -> None:
    """Moves what was recorded now to the night's own time."""
    when = FIRST + datetime.timedelta(days=night)
    with store.database.writing() as session:
        session.execute(sa.update(kind).where(kind.id == name).values({column: when}))


def record_nights(store: Store, count: int = 14) -> list[str]:
    """Steady nights, a confirmed slowdown on the tenth; returns the campaigns."""
    rng = np.random.default_rng(1)
    store.record_board(NIGHT_BOARD, host="10.0.0.1", virtual=False, tags=[])
    campaigns = []
    for night in range(count):
        campaign = store.begin_campaign(KIND, ["harness", "nightly"], {"night": night})
        speed = float(20 * np.exp(rng.normal(0, 0.01))) * (0.9 if night >= 10 else 1)
        run = store.begin_run(
            campaign_id=campaign, board=NIGHT_BOARD, stage="curve", model_hash="m" * 64,
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
        Alert("screen", NIGHT_BOARD, "curve", "tpot_end", end.key.hash, point.campaign_id,
              point.run_id, point.at, 50.0, 55.0, 0.1, 0.001, 10, "a" * 64, "b" * 64, "confirmed",
              f"two A/Bs confirm it: {HOSTILE_WORDS}", None, True)
    )  # fmt: skip
    return campaigns


def record_comparison(store: Store) -> str:
    searches = Searches(store)
    found = searches.begin("compare", NIGHT_BOARD, ["harness", "compare", "kv=f16", "kv=int8"], {})
    one = {"verdict": "worse", "ratio": 1.04, "low": 1.02, "high": 1.06, "p": 0.002}
    pairs = [
        {"a": {"tpot_s": 0.05, "rss_mb": 300}, "b": {"tpot_s": 0.052 + n / 1e5, "rss_mb": 300}}
        for n in range(10)
    ]
    searches.finish(
        found,
        "worse",
        f"time per token: B is worse than A {HOSTILE_WORDS}",
        details={
            "arms": {"A": {"title": "kv=f16"}, "B": {"title": f"kv=int8 {HOSTILE_WORDS}"}},
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


def record_noted_nights(store: Store) -> None:
    record_nights(store)
    care = Care(store)
    care.note(NIGHT_BOARD, HEALTH, True, f"pass: it computes right {HOSTILE_WORDS}")
    care.note(NIGHT_BOARD, EVENT, True, "new kernel")
    with store.database.writing() as session:
        session.execute(
            sa.update(BoardEventRow)
            .where(BoardEventRow.kind == EVENT)
            .values(at=FIRST + datetime.timedelta(days=4.5))
        )
    Leases(store).acquire(NIGHT_BOARD, "ann@desk", "trying a fan", 600)
    record_comparison(store)
