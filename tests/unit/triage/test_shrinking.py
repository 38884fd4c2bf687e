"""A crash is made as small as it can be while it stays the same one, and is shipped as k of n."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from harness.triage.shrinking import Recipe, Shrinker

FIRST = Recipe.of(
    {
        "tokens": list(range(48)),
        "max_new": 8,
        "layers": None,
        "piece": None,
        "options": {"unit": "native", "executor": "compiled", "fused": True, "threads": 4,
                    "kv": "f16", "kv_layout": "mixed", "activations": "int8", "passes_off": []},
    }
)  # fmt: skip


def shrink(crashes: Callable[[Recipe], bool], layers: int = 30) -> tuple[Shrinker, int]:
    search, runs = Shrinker(FIRST, layers), 0
    while (recipe := search.ask()) is not None:
        runs += 1
        search.tell(crashes(recipe))
    return search, runs


def needs(recipe: Recipe) -> bool:
    """A crash of the fifth token, in the third layer, with int8 activations."""
    options = dict(recipe.options)
    deep = recipe.layers is None or recipe.layers >= 3
    return len(recipe.tokens) >= 5 and deep and options["activations"] == "int8"


def test_what_a_crash_does_not_need_is_taken_away() -> None:
    search, runs = shrink(needs)
    options = dict(search.best.options)
    assert search.found and (search.shown, search.tried) == (5, 5)
    assert (len(search.best.tokens), search.best.max_new, search.best.layers) == (5, 0, 3)
    assert options["activations"] == "int8"
    assert (options["executor"], options["fused"], options["threads"]) == ("sync", False, 1)
    assert (options["kv_layout"], options["kv"]) == ("numpy", "f32")
    assert search.best.piece == 1
    assert search.needs == ["activations=int8"]  # without it the crash does not come
    assert runs <= 60


def test_a_crash_that_does_not_come_again_is_said_so_after_three_runs() -> None:
    search, runs = shrink(lambda recipe: False)
    assert (search.found, runs, search.tried, search.shown) == (False, 3, 3, 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_crash_that_comes_half_the_time_is_shrunk_too(seed: int) -> None:
    chance = random.Random(seed)
    search, _ = shrink(lambda recipe: needs(recipe) and chance.random() < 0.5)
    if search.found:  # the first three runs may all miss it
        assert needs(search.best)
        assert search.tried == 5


def test_told_the_same_answers_again_it_goes_on_where_it_stood() -> None:
    search, answers = Shrinker(FIRST, 30), []
    for _ in range(20):
        recipe = search.ask()
        assert recipe is not None
        answers.append(needs(recipe))
        search.tell(answers[-1])
    again = Shrinker(FIRST, 30)
    for answer in answers:
        again.tell(answer)
    assert again.ask() == search.ask()


def test_a_recipe_survives_being_stored() -> None:
    assert Recipe.of(FIRST.to_json()) == FIRST
