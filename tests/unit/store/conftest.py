"""A store in a temporary folder, and runs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.records import Event
from harness.store import Store
from harness.verdicts import Check, Outcome, Verdict


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.sqlite") as opened:
        yield opened


@pytest.fixture
def verdict() -> Verdict:
    return Verdict(
        outcome=Outcome.FAIL,
        headline="decode is too slow at the end of the context",
        culprit="L07.ffn.down",
        remedy="quantise the KV cache",
        checks=(
            Check(
                name="tokens_per_s_at_end",
                outcome=Outcome.FAIL,
                measured=4.5,
                limit=12.0,
                unit="tok/s",
                sentence="4.5 tok/s at the end, at least 12 wanted",
            ),
            Check(
                name="greedy",
                outcome=Outcome.PASS,
                measured="equal",
                limit=None,
                sentence="token by token as the reference",
            ),
        ),
        details={"clocks": "unknown", "points": [1, 2.5], "note": "größer, 'quoted', 改行\n"},
    )


@pytest.fixture
def add_run(store: Store, verdict: Verdict) -> Callable[..., str]:
    """Adds a judged run with raw files; keyword arguments go to begin_run."""

    def add(
        campaign: str | None = None,
        board: str = "virt-1",
        stage: str = "curve",
        outcome: Outcome = Outcome.FAIL,
        **values: Any,
    ) -> str:
        campaign = campaign or store.begin_campaign("bringup", ["harness", "bringup"], {})
        run_id = store.begin_run(
            campaign_id=campaign, board=board, stage=stage, model_hash="ab" * 32, **values
        )
        write_raw(store.raw_folder(run_id))
        store.finish_run(run_id, verdict.model_copy(update={"outcome": outcome}))
        return run_id

    return add


def write_raw(folder: Path) -> None:
    events = [
        Event(0, 1_000_000_000, "run-start", {"boot_id": "b"}),
        Event(1, 2_000_000_000, "sample", {"rss_mb": 10.5, "temperatures": {"soc": 41.0}}),
        Event(2, 3_500_000_000, "sample", {"rss_mb": 11.0, "clocks_mhz": [800, 900]}),
        Event(3, 4_500_000_000, "run-end", {"status": "finished", "reason": ""}),
    ]
    (folder / "events.jsonl").write_bytes(b"".join(event.to_line() for event in events))
    (folder / "arrays").mkdir()
    np.savez(
        folder / "arrays" / "tokens.npz",
        t_ns=np.arange(4, dtype=np.int64) * 10,
        index=np.arange(3),
        grid=np.ones((4, 2), np.float32),
        seed=np.int64(7),
    )
