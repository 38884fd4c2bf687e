"""What an A/B of a night is asked to measure, and why there may be none."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.deploy.kept import build_hash
from harness.deploy.models import prepare_tiny
from harness.farm.confirming import Ab, BoardAb, choice_of, measure_for
from harness.farm.series import Key, Point, Series, of_board
from harness.inventory import Engine
from harness.statistics.policy import Night

STEADY = (50.0, 50.4, 49.7, 50.1, 49.9, 50.2)
AT = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


def series(metric: str, tonight: float = 60.0, good: str = "a" * 64, new: str = "") -> Series:
    builds = [good] * len(STEADY) + [new or build_hash()]
    points = tuple(
        Point(Night(value, build), f"run{n}", f"night{n}", AT + datetime.timedelta(n), "pass")
        for n, (value, build) in enumerate(zip((*STEADY, tonight), builds, strict=True))
    )
    key = Key("rk", metric, "m", "q", "{}")
    return Series(key, "small", "q8", points, ((0, "the first night"),), frozenset())


def row(**details: float) -> Any:
    return SimpleNamespace(details={"context": 2048, **details}, engine=None)


@pytest.mark.parametrize(
    ("metrics", "rate", "depth"),
    [
        (["tpot_end"], 1000.0, 2015),
        (["tpot_end"], 20.0, 600),  # a prompt of 30 s on a slow board
        (["tpot_middle", "rss"], 1000.0, 1024),
        (["tpot_start"], 1000.0, 16),
        (["ttft"], 1000.0, 128),
        (["rss"], 0.0, 128),
    ],
)
def test_an_ab_goes_as_deep_as_its_suspect_and_the_board_allow(
    metrics: list[str], rate: float, depth: int
) -> None:
    found = measure_for(row(prefill_tokens_per_s=rate), [series(name) for name in metrics])
    assert found.depth == depth


def test_both_engines_run_as_the_night_did() -> None:
    told = SimpleNamespace(engine={"engine": {"unit": "packed", "threads": 2}, "cpus": [4, 5]})
    choice = choice_of(told)  # type: ignore[arg-type]  # a run's engine alone
    assert choice is not None
    assert (choice.options.threads, choice.pin) == (2, (4, 5))
    assert choice_of(row()) is None


@pytest.fixture
def ab() -> Callable[..., Ab]:
    def ask(one: Series, stop: bool = False) -> Ab:
        notes: list[str] = []
        make = BoardAb([], prepare_tiny(0), Engine(), None, [], notes.append, lambda: stop)  # type: ignore[arg-type]  # no store is asked
        night = of_board("rk", [one])
        assert night.suspects == [one]
        return make(night, [one])

    return ask


def test_without_the_good_engine_there_is_no_ab_and_it_says_why(
    ab: Callable[..., Ab],
) -> None:
    assert "the good engine (aaaaaaaa) are not kept" in ab(series("tpot_end")).why
    assert "changed since the night" in ab(series("tpot_end", new="b" * 64)).why
    assert ab(series("tpot_end"), stop=True).why == "the night was stopped"
