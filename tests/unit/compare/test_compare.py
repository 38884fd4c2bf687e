"""A against B: what they are said to be, the pairs that are kept, the verdict on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.bisect.board_trials import Stopped
from harness.compare import planning
from harness.compare.arms import Arm, difference, parse
from harness.compare.judging import Pair, Visit, judge
from harness.compare.session import Orders, Session
from harness.deploy.kept import build_hash, keep, kept
from harness.deploy.models import PreparedModel, prepare_tiny
from harness.errors import BoardError, HarnessError
from harness.inventory import Engine, load_farm
from harness.statistics.pairs import order
from harness.statistics.validity import Start
from harness.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> PreparedModel:
    return prepare_tiny(0)


@pytest.fixture
def arms(tmp_path: Path, model: PreparedModel) -> dict[str, Arm]:
    (tmp_path / "devices.yaml").write_text("boards:\n  one: {host: 127.0.0.1, port: 1}\n")
    (board,) = load_farm(tmp_path / "devices.yaml").select(["one"], ())
    b = Engine(kv="int8")
    return {
        "A": Arm("as it is", board, Engine(), model, "e" * 64),
        "B": Arm("kv=int8", board, b, model, "e" * 64),
    }


class Bench:
    """Makes visits: B takes `ratio` of A's time, on a board that gets slower by 10 % meanwhile."""

    def __init__(self, ratio: float, sd: float = 0.004, seed: int = 1) -> None:
        self._rng, self._ratio, self._sd = np.random.default_rng(seed), ratio, sd
        self.letters = ""

    def __call__(self, letter: str) -> Visit:
        drift = 1 + 0.005 * len(self.letters)
        self.letters += letter
        time_s = 0.05 * drift * math.exp(self._rng.standard_t(4) * self._sd / math.sqrt(2))
        time_s *= self._ratio if letter == "B" else 1.0
        clocks = tuple(1800 + self._rng.normal(0, 3, 8))
        start = Start("boot", 45.0)
        return Visit({"tpot_s": time_s, "ttft_s": 9 * time_s, "rss_mb": 300.0}, start, clocks, 4.0)


Make = Callable[..., Session]


@pytest.fixture
def session(store: Store, arms: dict[str, Arm]) -> Make:
    def make(
        orders: Orders = Orders(deciding=("tpot_s",)),  # noqa: B008 - frozen
        stop: Callable[[], bool] = lambda: False,
        notes: list[str] | None = None,
    ) -> Session:
        kept = [] if notes is None else notes
        return Session(
            arms, orders, store, ["harness", "compare"], lambda told: None, kept.append, stop,
            False, pause_s=0,
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("ratio", "verdict", "code"), [(1.05, "worse", 1), (0.95, "better", 0), (1.0, "equivalent", 0)]
)
def test_turns_tell_a_difference_from_a_drift(
    ratio: float, verdict: str, code: int, session: Make
) -> None:
    bench = Bench(ratio, sd=0.002)
    report = session().run(bench)
    assert (report.judgement.verdict, report.exit_code) == (verdict, code)
    assert bench.letters == order(10)
    assert report.judgement.metrics["tpot_s"].ratio == pytest.approx(ratio, rel=0.01)
    assert report.judgement.metrics["rss_mb"].verdict == "equivalent"
    assert report.difference == (("option kv", "–", "int8"),)


def test_a_noisy_board_gets_twenty_pairs_and_then_unknown(session: Make) -> None:
    notes: list[str] = []
    bench = Bench(1.0, sd=0.05)
    report = session(notes=notes).run(bench)
    assert len(bench.letters) == 40
    assert (report.judgement.verdict, report.exit_code) == ("unknown", 1)
    assert notes == ["not decided: up to 20 pairs"]


def test_a_comparison_that_was_stopped_goes_on_with_its_pairs(session: Make, store: Store) -> None:
    first = Bench(1.05)
    with pytest.raises(Stopped):
        session(stop=lambda: len(first.letters) >= 7).run(first)
    notes: list[str] = []
    again = session(notes=notes)
    assert [len(again.pairs), *notes] == [
        3,
        f"going on with comparison {again.id[:8]}: 3 pairs are kept",
    ]
    second = Bench(1.05, seed=2)
    assert again.run(second).judgement.verdict == "worse"
    assert second.letters == order(10)[6:]
    assert planning.Searches(store).get(again.id).outcome == "worse"
    assert len(session().pairs) == 0  # what is over is not gone on with


def test_a_pair_that_did_not_begin_alike_is_made_again_and_never_counts(session: Make) -> None:
    bench, notes = Bench(1.05), []

    def visit(letter: str) -> Visit:
        made = bench(letter)
        hot = len(bench.letters) == 2
        return dataclasses.replace(made, start=Start("boot", 70.0 if hot else 45.0))

    report = session(notes=notes).run(visit)
    assert bench.letters[:4] == "ABAB"
    assert "70 °C" in notes[0]
    assert (report.judgement.verdict, len(report.pairs)) == ("worse", 10)


def test_a_board_that_is_lost_costs_its_pair_alone_and_ends_it_the_third_time(
    session: Make,
) -> None:
    bench, lost = Bench(1.05), [2]

    def visit(letter: str) -> Visit:
        if lost[0] and len(bench.letters) >= 3:
            lost[0] -= 1
            raise BoardError("one", "board-lost", "no answer")
        return bench(letter)

    assert session().run(visit).judgement.verdict == "worse"
    lost[0] = 99
    bench.letters = ""
    with pytest.raises(BoardError, match="no answer"):
        session().run(visit)


def test_clocks_that_differ_by_arm_make_the_verdict_invalid(session: Make) -> None:
    bench = Bench(1.05)

    def visit(letter: str) -> Visit:
        made = bench(letter)
        slower = 0.96 if letter == "B" else 1.0
        return dataclasses.replace(made, clocks_mhz=tuple(x * slower for x in made.clocks_mhz))

    report = session().run(visit)
    assert (report.judgement.verdict, report.exit_code) == ("invalid", 1)
    assert "not judged: A ran at 1800 MHz, B at 17" in report.headline


def test_the_worst_metric_speaks_for_all(arms: dict[str, Arm]) -> None:
    def visit(tpot: float, rss: float) -> Visit:
        return Visit({"tpot_s": tpot, "ttft_s": 1.0, "rss_mb": rss})

    pairs = [Pair(visit(1.0, 100.0), visit(0.9, 110.0 + n / 100)) for n in range(10)]
    assert judge(pairs, ("tpot_s",)).verdict == "better"
    assert judge(pairs, ("tpot_s", "rss_mb")).verdict == "worse"
    less = [Pair(pair.a, Visit({"tpot_s": 0.9})) for pair in pairs]
    untold = judge(less, ("tpot_s", "rss_mb"))
    assert (untold.verdict, untold.reason) == ("invalid", "not told by every run: peak memory")


def test_the_plan_comes_from_the_boards_own_pairs(session: Make, store: Store) -> None:
    assert planning.planned(store, "one", 0.02, ["tpot_s"]) == {}
    assert "not known yet" in planning.plan_lines({}, ["tpot_s"], "one")[0]
    session().run(Bench(1.05, sd=0.01))
    found = planning.planned(store, "one", 0.02, ["tpot_s"])
    plan = found["tpot_s"]
    assert plan.enough
    assert 0.005 < plan.sd < 0.02  # the drift and the difference are no noise
    assert plan.minutes == pytest.approx(plan.pairs * 8 / 60)
    assert "on this board needs" in planning.plan_lines(found, ["tpot_s"], "one")[0]
    with pytest.raises(HarnessError, match="smaller one is none"):
        planning.planned(store, "one", 0.005, ["tpot_s"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv", "expected NAME=VALUE"),
        ("rev=a engine=b", "rev= and engine="),
        ("model=a model=b", "twice"),
        ("env='A=1", "No closing quotation"),
    ],
)
def test_words_that_say_nothing_or_two_things_are_refused(text: str, said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        parse("A", text)


def test_an_arm_is_a_few_words(arms: dict[str, Arm]) -> None:
    words = parse("B", "kv=int8 env=A=b=c 'model=my model.gguf' rev=v1.4")
    assert (words.options, words.environment) == (("kv=int8",), ("A=b=c",))
    assert (words.model, words.source) == ("my model.gguf", "rev=v1.4")
    assert parse("A", ".").source is None
    assert parse("A", "rev=.").source is None
    assert difference(arms["A"].config(), arms["A"].config()) == []


def test_an_engine_that_ran_is_kept_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("harness.deploy.kept.KEPT", 2)
    sources = tmp_path / "engine"
    (sources / "native" / "src").mkdir(parents=True)
    (sources / "native" / "src" / "run.c").write_text("int a;")
    names = []
    for number in range(3):
        (sources / "__init__.py").write_text(f"VERSION = {number}\n")
        names.append(keep(sources))
    assert kept(names[0]) is None
    place = kept(names[2][:10])
    assert place is not None
    assert (place / "native" / "src" / "run.c").read_text() == "int a;"
    assert build_hash(place) == names[2]
    assert kept("../../etc") is None
    (sources / "native" / "src" / "run.c").write_text("int b;")
    assert build_hash(sources) != names[2]
