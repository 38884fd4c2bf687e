"""What an A/B of a night is asked to measure, and why there may be none."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.deploy.kept import build_hash
from harness.deploy.models import prepare_tiny
from harness.farm.confirming import Ab, BoardAb, choice_of, measure_for, reached, settle
from harness.farm.series import BoardTonight, Key, Point, Series, of_board
from harness.inventory import Engine
from harness.statistics.policy import Answer, Night
from harness.store import Store
from harness.store.alerts import Alert

STEADY = (50.0, 50.4, 49.7, 50.1, 49.9, 50.2)
WORSE, EQUAL = Answer("worse", 0.2), Answer("equivalent", 0.004)
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


def test_an_ab_clears_what_it_reached_and_a_deeper_one_reaches_more() -> None:
    suspects = [series(name) for name in ("tpot_start", "tpot_middle", "tpot_end", "ttft", "rss")]
    fast, slow = row(prefill_tokens_per_s=1000.0), row(prefill_tokens_per_s=20.0)
    assert len(reached(fast, suspects, measure_for(fast, suspects))) == 5
    assert reached(slow, suspects, measure_for(slow, suspects)) == {"tpot_start", "ttft", "rss"}
    shallow = measure_for(fast, suspects[:1])
    assert reached(fast, suspects, shallow) == {"tpot_start"}


class Asked:
    """Answers A/Bs in turn, and keeps what each was asked for."""

    def __init__(self, *answers: Ab) -> None:
        self.answers = list(answers)
        self.of: list[str] = []

    def __call__(self, night: BoardTonight, suspects: Sequence[Series]) -> Ab:
        self.of.append(" ".join(one.metric.name for one in suspects))
        return self.answers.pop(0)


def settled(night: BoardTonight, ask: Asked, tmp_path: Path) -> dict[str, Alert]:
    with Store.open(tmp_path / "results.sqlite") as store:
        return {one.metric: one for one in settle([night], "c", store, ask, lambda _: None)}


def test_series_whose_good_engines_differ_are_not_settled_by_one_ab(tmp_path: Path) -> None:
    """A change of one of them was confirmed meanwhile: it must not be found again."""
    old, new = series("rss", good="a" * 64), series("tpot_end", good="c" * 64)
    ask = Asked(*(Ab({"rss_mb": EQUAL, "tpot_s": EQUAL}) for _ in range(2)))
    found = settled(of_board("rk", [old, new]), ask, tmp_path)
    assert sorted(ask.of) == ["rss", "tpot_end"]
    assert [found[name].good_build for name in ("rss", "tpot_end")] == ["a" * 64, "c" * 64]


def test_of_two_abs_each_number_keeps_the_answer_that_counts_with_its_words(
    tmp_path: Path,
) -> None:
    night = of_board("rk", [series("tpot_end"), series("ttft")])
    names = frozenset({"tpot_end", "ttft"})
    ask = Asked(
        Ab({"tpot_s": WORSE, "ttft_s": EQUAL}, {"tpot_s": "t1", "ttft_s": "f1"}, "s1", names),
        Ab({"tpot_s": WORSE, "ttft_s": WORSE}, {"tpot_s": "t2", "ttft_s": "f2"}, "s2", names),
    )
    found = settled(night, ask, tmp_path)
    assert ask.of == ["tpot_end ttft", "tpot_end ttft"]
    assert (found["tpot_end"].decided, found["ttft"].decided) == ("confirmed", "refuted")
    assert (found["tpot_end"].told[-2:], found["ttft"].told[-2:]) == ("t2", "f1")


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
