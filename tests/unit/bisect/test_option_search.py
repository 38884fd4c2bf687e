"""The search among options, on a simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from harness.bisect.option_verdicts import Outcome, Question, Verdict
from harness.bisect.options import MOST_TROUBLE, OptionSearch
from harness.bisect.trials import Result, Trial
from tests.planted.simulated_options import OTHER, SimulatedEngine, space

SPACE = space(layers=12)


def searched(engine: SimulatedEngine, **more: object) -> Verdict:
    return engine.search(OptionSearch(SPACE, **more))  # type: ignore[arg-type]  # of any kind


@pytest.mark.parametrize("name", SPACE.names)
def test_a_single_option_is_named_in_a_few_runs_whichever_it_is(name: str) -> None:
    engine = SimulatedEngine([frozenset({name})])
    verdict = searched(engine)
    assert (verdict.outcome, verdict.names, verdict.disable) == (Outcome.NAMED, (name,), (name,))
    assert verdict.confidence is not None
    assert verdict.confidence >= 0.99
    assert engine.runs <= 15


def test_a_pair_is_named_and_one_of_it_is_enough_to_switch_off() -> None:
    verdict = searched(SimulatedEngine([frozenset({"fusion.qkv", "int8.L07"})]))
    assert verdict.outcome is Outcome.NAMED
    assert verdict.names == ("fusion.qkv", "int8.L07")
    assert verdict.disable == ("int8.L07",)


def test_two_options_that_each_fail_alone_must_both_be_switched_off() -> None:
    engine = SimulatedEngine([frozenset({"threads"}), frozenset({"int8.L03"})])
    verdict = searched(engine)
    assert verdict.outcome is Outcome.NAMED
    assert [one.options for one in verdict.sets] == [("threads",), ("int8.L03",)]
    assert set(verdict.disable) == {"threads", "int8.L03"}


def test_what_an_option_needs_is_told_apart_from_what_is_to_blame() -> None:
    (found,) = searched(SimulatedEngine([frozenset({"kv"})])).sets
    assert (found.options, found.needed) == (("kv",), ("kv_layout",))


def test_a_rare_failure_with_a_background_is_named_all_the_same() -> None:
    rng = np.random.default_rng(3)
    verdict = searched(SimulatedEngine([frozenset({"huge_pages"})], p=0.3, q=0.01, rng=rng))
    assert (verdict.outcome, verdict.names) == (Outcome.NAMED, ("huge_pages",))


def test_settings_that_do_not_run_are_left_out() -> None:
    broken = [("int8.L04", "int8.L05")]  # L04 does not run without L05
    verdict = searched(SimulatedEngine([frozenset({"int8.L05"})], broken=broken))
    assert (verdict.outcome, verdict.names) == (Outcome.NAMED, ("int8.L05",))
    assert verdict.sets[0].beside == ("int8.L04",)
    assert set(verdict.disable) == {"int8.L04", "int8.L05"}
    verdict = searched(SimulatedEngine([frozenset({"int8.L04"})], broken=broken))
    assert (verdict.outcome, verdict.names) == (Outcome.NAMED, ("int8.L04", "int8.L05"))
    assert verdict.disable == ("int8.L04",)


def test_what_an_option_needs_is_tried_without_it_where_no_prefix_could() -> None:
    broken = [("huge_pages", "kv")]  # so that no prefix ends with kv_layout
    verdict = searched(SimulatedEngine([frozenset({"kv_layout"})], broken=broken))
    assert verdict.names == ("kv_layout",)
    verdict = searched(SimulatedEngine([frozenset({"kv"})], broken=broken))
    assert verdict.names == ("kv",)


def test_a_loss_to_which_every_layer_adds_names_no_option() -> None:
    layers = [name for name in SPACE.names if name.startswith("int8.")]
    engine = SimulatedEngine([], costs=dict.fromkeys(layers, 1.0), limit=0.7 * len(layers))
    verdict = searched(engine)
    assert (verdict.outcome, verdict.names) == (Outcome.GRADED, ())


def test_what_passes_with_everything_on_is_not_reproducible() -> None:
    engine = SimulatedEngine([])
    assert searched(engine).outcome is Outcome.NOT_REPRODUCED
    assert engine.runs == 5  # the same bits each time
    flaky = SimulatedEngine([frozenset({"kv"})], p=1e-9)
    assert searched(flaky).outcome is Outcome.NOT_REPRODUCED
    assert flaky.runs == 93  # ln(100) / 5 %


def test_what_fails_with_everything_off_blames_no_option() -> None:
    verdict = searched(SimulatedEngine([frozenset()]))
    assert (verdict.outcome, verdict.names) == (Outcome.ALWAYS, ())


def test_another_failure_is_not_the_one_that_is_hunted() -> None:
    # The crash needs `kv` without `threads`, the wrong logits need `int8.L02`.
    engine = SimulatedEngine([frozenset({"int8.L02"})], broken=[("kv", "int8.L00")])
    verdict = searched(engine)
    assert "int8.L02" in verdict.names
    crash = SimulatedEngine([], broken=[("kv", "nothing")])
    assert searched(crash).names == ("kv",)
    assert searched(crash, signature=OTHER).names == ("kv",)


def test_the_budget_ends_the_search_with_what_is_left() -> None:
    verdict = searched(SimulatedEngine([frozenset({"kv"})], p=0.1, q=0.05), budget=40)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.names == ()
    assert verdict.suspects


def test_trouble_with_the_board_moves_nothing_and_ends_the_search_when_it_does_not_end() -> None:
    engine = SimulatedEngine([frozenset({"kv"})])
    search = OptionSearch(SPACE)
    lost = Trial("", {}, Result.INFRA)
    for _ in range(3):
        question = search.ask()
        search.tell(lost)
        assert search.ask() == question
    assert search.trials == 0
    assert engine.search(search).names == ("kv",)
    hopeless = OptionSearch(SPACE)
    for _ in range(MOST_TROUBLE):
        hopeless.tell(lost)
    end = hopeless.ask()
    assert isinstance(end, Verdict)
    assert end.outcome is Outcome.BOARD_LOST


def test_the_same_trials_lead_to_the_same_questions() -> None:
    engine = SimulatedEngine(
        [frozenset({"unit", "int8.L01"})], p=0.5, q=0.01, rng=np.random.default_rng(5)
    )
    first, asked, trials = OptionSearch(SPACE), [], []
    while isinstance(question := first.ask(), Question):
        asked.append(question)
        trials.append(engine.run(question))
        first.tell(trials[-1])
    again = OptionSearch(SPACE)
    for question, trial in zip(asked, trials, strict=True):
        assert again.ask() == question
        again.tell(trial)
    assert again.ask() == first.ask()
