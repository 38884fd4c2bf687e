"""Ranking what each option costs."""

from __future__ import annotations

from harness.bisect.ranking import Ranked, Ranking
from harness.bisect.trials import Result, Trial
from tests.planted.simulated_options import space

SPACE = space(layers=3)


def ranked(costs: dict[str, float], lost: frozenset[str] | None = None) -> tuple[Ranked, int]:
    ranking = Ranking(
        SPACE.names,
        {name: SPACE.closed([name]) for name in SPACE.names},
        {name: SPACE.without([name]) for name in SPACE.names},
    )
    runs = 0
    while not isinstance(move := ranking.ask(), Ranked):
        runs += 1
        loss = None if move == lost else 0.01 + sum(costs.get(name, 0.0) for name in move)
        ranking.tell(move, Trial("ranking", {}, Result.PASS, value=loss))
    assert runs == len(ranking) == ranking.done
    return move, runs


def test_options_are_ranked_by_what_they_cost_left_out_and_alone() -> None:
    found, runs = ranked({"int8.L00": 0.3, "int8.L01": 0.2, "kv": 0.1})
    assert [effect.name for effect in found.effects[:3]] == ["int8.L00", "int8.L01", "kv"]
    assert runs <= 2 * len(SPACE) + 2
    first = found.effects[0]
    assert first.left_out is not None
    assert first.alone is not None
    assert abs(first.left_out - 0.3) < 1e-9 > abs(first.alone - 0.3)
    share = found.share(first)
    assert share is not None
    assert abs(share - 0.5) < 1e-9


def test_what_an_option_needs_is_not_counted_as_its_cost() -> None:
    found, _ = ranked({"kv_layout": 0.5})
    costs = {effect.name: effect.alone for effect in found.effects}
    assert costs["kv"] == 0.0


def test_a_loss_that_one_option_explains_is_not_graded() -> None:
    assert not ranked({"kv": 1.0, "int8.L00": 0.1})[0].graded
    assert ranked({f"int8.L0{layer}": 0.1 for layer in range(3)})[0].graded


def test_a_run_without_a_value_leaves_its_place_empty() -> None:
    found, _ = ranked({"int8.L00": 0.3}, lost=SPACE.closed(["int8.L00"]))
    effect = next(effect for effect in found.effects if effect.name == "int8.L00")
    assert effect.alone is None
    assert effect.mean == effect.left_out
