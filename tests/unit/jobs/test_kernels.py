"""A speed counts only with the kernels that it was meant for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.jobs.base import StageContext
from harness.jobs.kernels import engine_words, fallbacks, judge_kernels
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from tests.unit.jobs.conftest import LogBuilder

Contexts = Callable[..., StageContext]
READY: dict[str, Any] = {
    "unit": "native",
    "threads": 2,
    "cpus": [4, 5, 6, 7],
    "engine": {"executor": "compiled", "activations": "int8", "kv": "f16"},
    "kernels": {"all": "dotprod", "linear": "dotprod", "attention": "dotprod"},
    "native": {"isa": "dotprod", "reason": "the best that all allowed cores support"},
}


def test_what_ran_is_told_in_a_sentence(build: LogBuilder, stage_context: Contexts) -> None:
    check = judge_kernels(stage_context(), build.started(**READY).ended())
    assert check.outcome == Outcome.PASS
    assert check.measured == (
        "native unit, dotprod kernels, compiled executor, 2 threads on cores 4-7, "
        "int8 activations, f16 keys and values"
    )


def test_a_slow_kernel_fails_the_speed_by_name(build: LogBuilder, stage_context: Contexts) -> None:
    slow = "dotprod, slow for L00.attn.q and 3 more: layout blocked, not interleaved"
    ready = {**READY, "kernels": {**READY["kernels"], "linear": slow}}
    check = judge_kernels(stage_context(), build.started(**ready).ended())
    assert check.outcome == Outcome.FAIL
    assert check.measured == "linear L00.attn.q and 3 more"
    assert "layout blocked, not interleaved" in check.sentence
    assert fallbacks(ready) == [("linear L00.attn.q and 3 more", "layout blocked, not interleaved")]


def test_numpy_in_place_of_native_code_is_a_warning_with_its_reason(
    build: LogBuilder, stage_context: Contexts
) -> None:
    log = build.started(unit="packed", kernels={"all": "numpy (openblas)"}).ended()
    check = judge_kernels(stage_context(engine={}), log)  # there is no compiler for this board
    assert check.outcome == Outcome.WARN
    assert "no compiler is here" in check.sentence


def test_kernels_that_were_asked_for_are_told_with_what_the_cores_lack(
    build: LogBuilder, stage_context: Contexts
) -> None:
    reason = "asked for by ENGINE_KERNELS or the options, although the cores lack asimddp"
    ready = {**READY, "native": {"isa": "dotprod", "reason": reason, "missing": ["asimddp"]}}
    check = judge_kernels(stage_context(), build.started(**ready).ended())
    assert check.outcome == Outcome.PASS
    assert "lack asimddp" in check.sentence


def test_an_engine_that_tells_little_is_told_as_far_as_it_goes() -> None:
    assert engine_words({"unit": "packed", "kernels": {"all": "numpy (x)"}}) == (
        "packed unit, numpy (x)"
    )
    assert engine_words({}) == "unknown unit"
    assert fallbacks({"kernels": None}) == []
