"""A results store of a farm that was tested every night of a year, written in bulk.

The rows are those of the store's own models, with details as long as those of real runs; the
numbers differ from night to night and repeat from board to board.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from harness.store import Store
from harness.store.models import (
    BoardRow,
    CampaignRow,
    CheckRow,
    ModelRow,
    NumbersRow,
    RunRow,
)
from harness.store.numbers import PLACES, numbers_of
from harness.store.numbers import STAGES as NUMBERED
from harness.store.store import check_row
from harness.verdicts import Verdict

from ..sample_campaigns.verdicts import (
    accuracy_verdict,
    curve_verdict,
    facts,
    stress_verdict,
    tiny_verdict,
)

FIRST = datetime.datetime(2025, 1, 1, 2, 0, tzinfo=datetime.UTC)
STAGES = ("tiny", "accuracy", "curve", "stress")
MODEL, MODEL_HASH, TINY_HASH = "SmolLM2-135M-Instruct", "9c1f" * 16, "71f1" * 16
SCHEME = "W4A16 (Q4_1)"
STRESS_MINUTES = 5.0  # of a nightly run: a sample a second
KINDS = 7  # verdicts of each stage that differ; a prime, so that nights and boards mix


@dataclasses.dataclass(frozen=True)
class Size:
    boards: int
    nights: int

    @property
    def results(self) -> int:
        return self.boards * self.nights * len(STAGES)

    def __str__(self) -> str:
        return f"{self.boards} boards × {self.nights} nights"


@dataclasses.dataclass(frozen=True)
class _Ready:
    """JSON that is written already: a row's details are 100 kB, and there are 300,000 rows."""

    text: str


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What is the same in every run of one verdict."""

    run: dict[str, Any]
    checks: tuple[dict[str, Any], ...]
    numbers: dict[str, Any]


def fill(path: Path, size: Size) -> None:
    """Makes the store at `path`, a SQLite file that is not there yet."""
    with Store.open(path) as store:
        url = store.database.url
    engine = sa.create_engine(url, json_serializer=_to_json)
    kinds = {stage: [_kind(stage, seed) for seed in range(KINDS)] for stage in STAGES}
    boards = [f"board-{number:03d}" for number in range(1, size.boards + 1)]
    with engine.begin() as connection:
        connection.execute(sa.insert(BoardRow), [_board(name) for name in boards])
        connection.execute(
            sa.insert(ModelRow),
            [
                {"hash": MODEL_HASH, "name": MODEL, "scheme": SCHEME},
                {"hash": TINY_HASH, "name": "tiny", "scheme": SCHEME},
            ],
        )
    for night in range(size.nights):
        with engine.begin() as connection:
            campaign = str(uuid.UUID(int=night + 1))
            connection.execute(sa.insert(CampaignRow), [_campaign(campaign, night)])
            runs = list(_runs(campaign, night, boards, kinds))
            connection.execute(sa.insert(RunRow), [run for run, _ in runs])
            connection.execute(
                sa.insert(CheckRow),
                [{**check, "run_id": run["id"]} for run, kind in runs for check in kind.checks],
            )
            connection.execute(
                sa.insert(NumbersRow),
                [
                    {**kind.numbers, "run_id": run["id"]}
                    for run, kind in runs
                    if run["stage"] in NUMBERED
                ],
            )
    engine.dispose()


def one_more(store: Store, board: str, verdict: Verdict | None = None) -> None:
    """A bring-up of one board in the daytime: its tiny stage, through the store's own methods."""
    campaign = store.begin_campaign("bringup", ["harness", "bringup", "--board", board], {})
    run = store.begin_run(
        campaign_id=campaign,
        board=board,
        stage="tiny",
        model_hash=TINY_HASH,
        model_name=MODEL,
        scheme=SCHEME,
    )
    told = verdict if verdict is not None else tiny_verdict()
    store.finish_run(run, told)
    store.finish_campaign(campaign, told.outcome)


def _to_json(value: object) -> str:
    return value.text if isinstance(value, _Ready) else json.dumps(value)


def kind_of(night: int, number: int, place: int) -> int:
    """Which verdict a board's run of a night has. Most nights of a board are alike; one in some
    weeks differs."""
    odd = (night * 31 + number * 17 + place) % 97 == 0
    return KINDS - 1 if odd else (night + number) % (KINDS - 1)


def verdict_of(stage: str, seed: int) -> Verdict:
    if stage == "tiny":
        return tiny_verdict(400.0 + seed)
    if stage == "accuracy":
        return accuracy_verdict(seed, fault=seed == KINDS - 1)
    if stage == "curve":
        return curve_verdict(seed, speed=1 + seed / 20, jump=seed == 2)
    return stress_verdict(seed, minutes=STRESS_MINUTES, throttle=seed == 3)


def _kind(stage: str, seed: int) -> _Kind:
    verdict = verdict_of(stage, seed)
    return _Kind(
        {
            "stage": stage,
            "outcome": verdict.outcome.value,
            "headline": verdict.headline,
            "culprit": verdict.culprit,
            "remedy": verdict.remedy,
            "details": _Ready(json.dumps(_rounded(dict(verdict.details)))),
        },
        tuple(_check(position, check) for position, check in enumerate(verdict.checks)),
        {name: None for name in PLACES} | dict(numbers_of(verdict.details)),
    )


def _check(position: int, check: Any) -> dict[str, Any]:
    row = check_row(position, check)
    names = {a.key for a in sa.inspect(CheckRow).column_attrs} - {"id", "run_id"}
    return {name: getattr(row, name) for name in names}


def _rounded(value: Any) -> Any:
    """Six digits, as measured ones have."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < 0.99 or abs(value) > 1 else value
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _board(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "host": f"{name}.lab",
        "virtual": False,
        "tags": ["nightly"],
        "budget": {"memory_mb": 600, "min_tokens_per_s": 8.0, "min_cosine": 0.99},
        "facts": facts(),
    }


def _campaign(campaign: str, night: int) -> dict[str, Any]:
    began = FIRST + datetime.timedelta(days=night)
    return {
        "id": campaign,
        "kind": "nightly",
        "command": ["harness", "nightly", "--tag", "nightly"],
        "options": {"seed": 0},
        "options_hash": "0" * 64,
        "owner": "lab 1 1 1",
        "outcome": "pass",
        "started_at": began,
        "finished_at": began + datetime.timedelta(hours=1),
    }


def _runs(
    campaign: str, night: int, boards: list[str], kinds: dict[str, list[_Kind]]
) -> Iterator[tuple[dict[str, Any], _Kind]]:
    known = _Ready(json.dumps(facts()))
    began = FIRST + datetime.timedelta(days=night)
    for number, board in enumerate(boards):
        for place, stage in enumerate(STAGES):
            kind = kinds[stage][kind_of(night, number, place)]
            start = began + datetime.timedelta(minutes=8 * place, milliseconds=number)
            run = {
                **kind.run,
                "id": str(uuid.UUID(int=(night << 64) | (number << 8) | (place + 1))),
                "campaign_id": campaign,
                "board": board,
                "model_hash": TINY_HASH if stage == "tiny" else MODEL_HASH,
                "model_name": "tiny" if stage == "tiny" else MODEL,
                "scheme": SCHEME,
                "engine_hash": "e4b1" * 16,
                "parameters": {"seed": 0, "unit": "native"},
                "boot_id": "6f9619ff-8b86-d011-b42d-00cf4fc964ff",
                "attempt": 1,
                "state": "judged",
                "facts": known,
                "started_at": start,
                "finished_at": start + datetime.timedelta(minutes=7),
                "seconds": 400.0,
                "clocks": "valid",
            }
            yield run, kind
