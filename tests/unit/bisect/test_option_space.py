"""The options of an engine: closures, and the setting of any set of them."""

from __future__ import annotations

import dataclasses

import pytest

from engine.options import EngineOptions
from engine.program.passes import pass_names
from harness.bisect.option_space import Setting, Space
from tests.planted.simulated_options import space


def test_everything_on_is_the_engine_as_it_was_asked_for_and_nothing_on_is_the_plainest() -> None:
    found = space(layers=3)
    assert found.setting(found.names) == found.full
    plain = found.setting(())
    assert plain == Setting(EngineOptions(threads=1), None, "blocked")


def test_every_prefix_of_the_list_can_be_run() -> None:
    found = space(layers=3)
    for length in range(len(found) + 1):
        names = found.names[:length]
        assert found.closed(names) == frozenset(names)
        found.setting(names)


def test_what_an_option_needs_comes_with_it_and_what_needs_it_goes_with_it() -> None:
    found = space(layers=2)
    assert found.closed(["kv"]) == {"kv", "kv_layout"}
    assert found.closed(["executor"]) == {"executor", "unit"}
    assert "fusion.activation" not in found.without(["fusion.gate_up"])
    assert found.without(["unit"]).isdisjoint({"unit", "executor", "kernels", "huge_pages"})


def test_single_layers_and_passes_are_switched_by_themselves() -> None:
    found = space(layers=2)
    engine = found.setting(found.without(["int8.L01", "fusion.qkv"])).engine
    assert engine.float_layers == ("L01",)
    assert engine.passes_off == ("qkv",)
    engine = found.setting(found.closed(["int8.L00", "fusion.residual"])).engine
    assert engine.float_layers == ("L01", "head")
    assert set(engine.passes_off) == set(pass_names()) - {"residual"}
    assert not found.setting(["kv_layout"]).engine.fused


def test_what_was_not_asked_for_is_no_option() -> None:
    engine = dataclasses.replace(
        EngineOptions(), fused=True, passes_off=("qkv",), threads=1, kv_layout="sd", kv="int8"
    )
    found = Space(Setting(engine, None, "blocked"), ["L00"], pass_names())
    passes = [f"fusion.{name}" for name in pass_names() if name != "qkv"]
    assert found.names == ("kv_layout", "kv", *passes)


def test_options_that_do_not_go_together_are_refused() -> None:
    found = space(layers=2)
    with pytest.raises(ValueError, match="only the native unit is compiled"):
        found.setting(["executor"])
    with pytest.raises(ValueError, match="plain arrays"):
        found.setting(["kv"])


def test_a_setting_is_told_as_words_of_a_command() -> None:
    found = space(layers=1)
    words = found.setting(found.closed(["kv", "int8.L00"])).words()
    assert words == [
        "--unit packed",
        "--engine-option activations=int8",
        "--engine-option kv=f16",
        "--engine-option kv_layout=mixed",
        "--engine-option threads=1",
        "--engine-option float_layers=head",
    ]
