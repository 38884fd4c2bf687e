"""The numbers that nights are held against, beside the details that hold them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import sqlalchemy as sa

from harness.store import Store, numbers
from harness.store.database import upgrade
from harness.verdicts import Outcome, Verdict

CURVE = {"tokens_per_s_end": 8.0, "rss_peak_mb": 300, "ttft_s": None, "tokens_per_s_start": "x"}


def test_numbers_are_those_of_the_details_and_nothing_else() -> None:
    assert numbers.numbers_of(CURVE) == {"speed_end": 8.0, "rss_mb": 300.0}
    assert numbers.numbers_of({"logits": {"mean_kl": 0.01}}) == {"mean_kl": 0.01}
    assert numbers.numbers_of({"logits": "broken"}) == {}
    assert numbers.numbers_of(None) == {}


def test_a_run_that_is_judged_again_has_its_new_numbers(tmp_path: Path) -> None:
    with Store.open(tmp_path / "results.sqlite") as store:
        campaign = store.begin_campaign("nightly", [], {})
        run = store.begin_run(campaign_id=campaign, board="rk", stage="curve", parameters={"a": 1})
        for details in (CURVE, {**CURVE, "tokens_per_s_end": 9.0}, {}):
            verdict = Verdict(outcome=Outcome.PASS, headline="x", details=details)
            store.finish_run(run, verdict)
            found = numbers.nights(store, "nightly", 5)
            assert [row.speed_end for row in found] == [
                speed for speed in [details.get("tokens_per_s_end")] if speed is not None
            ]
        assert numbers.nights(store, "bringup", 5) == []


def test_runs_of_an_older_store_get_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    engine = sa.create_engine(f"sqlite:///{path}")
    when = datetime.datetime(2026, 1, 1).isoformat(" ")
    with engine.begin() as connection:
        upgrade(connection, "0006")
        connection.exec_driver_sql("INSERT INTO boards (name) VALUES ('rk')")
        connection.exec_driver_sql(
            "INSERT INTO campaigns (id, kind, command, options, options_hash, owner, started_at)"
            f" VALUES ('c', 'nightly', '[]', '{{}}', 'h', 'o', '{when}')"
        )
        for name, details in (("r1", json.dumps(CURVE)), ("r2", "not JSON"), ("r3", None)):
            connection.exec_driver_sql(
                "INSERT INTO runs (id, campaign_id, board, stage, parameters, attempt, state,"
                " outcome, details, engine_hash, started_at)"
                " VALUES (?, 'c', 'rk', 'curve', '{}', 1, 'judged', 'pass', ?, 'e', ?)",
                (name, details, when),
            )
    engine.dispose()
    with Store.open(path) as store:
        (row,) = numbers.nights(store, "nightly", 5)
    assert (row.run_id, row.speed_end, row.ttft_s, row.build) == ("r1", 8.0, None, "e")
