"""The same store in PostgreSQL, where HARNESS_TEST_POSTGRES_URL names an empty database."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from harness.boards.leases import Lease, Leases
from harness.errors import BoardError
from harness.store import Store
from harness.store.models import Base
from harness.verdicts import Verdict

URL = os.environ.get("HARNESS_TEST_POSTGRES_URL", "")

pytestmark = pytest.mark.skipif(not URL, reason="HARNESS_TEST_POSTGRES_URL is not set")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    with Store.open(URL) as store:
        yield store
        with store.database.writing() as session:
            Base.metadata.drop_all(session.connection())
            session.execute(sa.text("DROP TABLE alembic_version"))


def test_threads_that_write_at_once_lose_nothing(shared: Store, verdict: Verdict) -> None:
    campaign = shared.begin_campaign("bringup", ["harness"], {})

    def write() -> None:
        with Store.open(URL) as store:
            for _ in range(5):
                run_id = store.begin_run(
                    campaign_id=campaign, board="rk-01", stage="tiny", model_hash="ab" * 32
                )
                store.finish_run(run_id, verdict)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = shared.frames.runs()
    assert sorted(runs["attempt"]) == list(range(1, 21))
    assert runs["details"].iloc[0] == verdict.details
    assert len(shared.frames.checks()) == 40
    assert len(shared.frames.latest_matrix()) == 1


def test_two_hosts_that_ask_at_once_get_one_lease(shared: Store) -> None:
    won: list[Lease] = []
    refused: list[str] = []

    def ask() -> None:
        with Store.open(URL) as store:
            try:
                won.append(Leases(store).acquire("rk-01", reason="race", ttl_s=60))
            except BoardError as error:
                refused.append(error.kind)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert refused == ["busy"] * 5
    leases = Leases(shared)
    assert leases.holder("rk-01") is not None
    lease = leases.acquire("rk-02", "ann@elsewhere", "short", ttl_s=0.2)
    lease.heartbeat()
    lease.release()
    assert leases.holder("rk-02") is None
