"""Accuracy faults planted by seed in the ops of a small model: is the first bad op named?

A fault is detectable if it changes what an op of the program writes, in exact arithmetic, by more
than the rule of the comparison lets a right engine deviate. Others are listed apart: an error that
cancels inside a fused op, a zero point of a group that hardly sees an input.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.native.library import NativeUnavailable, load
from engine.options import EngineOptions
from engine.program.ops import Op
from harness.deploy.models import PreparedModel
from harness.jobs import references
from harness.jobs.comparison import BASE_FACTOR, ELEMENT_TOLERANCE, TOLERANCE
from harness.verdicts import Outcome
from tests.planted import emulated
from tests.planted.aligned_here import aligned, effect, small_model
from tests.planted.cases import Bench, Case, Context, Target

NATIVE = EngineOptions.for_unit("native")
# Name → how the engine runs.
ENGINES = {
    "packed": EngineOptions(),
    "packed, fused": EngineOptions(fused=True),
    "native, op by op": EngineOptions(unit="native"),
    "native": NATIVE,
    "native, portable kernels": dataclasses.replace(NATIVE, kernels="generic"),
    "native, int8 cache": dataclasses.replace(NATIVE, kv="int8"),
    "native, async": dataclasses.replace(NATIVE, executor="async"),
}
# Fault → the kinds of op it is planted in.
FAULTS = {
    "scale:1.02": ("embed", "rmsnorm", "linear", "rope", "attention", "swiglu", "add"),
    "zero-row": ("rmsnorm", "linear", "attention", "swiglu"),
    "swap-heads": ("rope", "attention"),
    "shift:1": ("rope",),
    "stale": ("kv_append",),
    "zero-point:1": ("linear",),
    "nan": ("rmsnorm", "linear", "attention", "swiglu", "add"),
    "cancel:2": ("rmsnorm", "linear", "swiglu"),
}
ROOM = 3.0  # of the rule's tolerance: what is called detectable is clearly beyond it
MODELS = 3
CLEAN, SMALL = "clean control", "too small to tell"


def run(context: Context) -> Iterator[Case]:
    engines = dict(ENGINES)
    try:
        load()
    except NativeUnavailable as error:
        context.tell(f"accuracy: numpy alone, without a compiler: {error}")
        engines = {name: found for name, found in engines.items() if found.unit != "native"}
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        models = [small_model(context.seed * 100 + index, folder) for index in range(MODELS)]
        for number, (fault, kinds) in enumerate(FAULTS.items()):
            for case in range(context.cases):
                rng = np.random.default_rng([context.seed, number, case])
                yield _planted(fault, kinds, models, engines, rng, folder)
        for case in range(context.cases):
            rng = np.random.default_rng([context.seed, len(FAULTS), case])
            yield _clean(models, engines, rng, folder)
    if not context.quick:
        yield from emulated.cases(context)


def _planted(
    fault: str,
    kinds: tuple[str, ...],
    models: list[PreparedModel],
    engines: dict[str, EngineOptions],
    rng: np.random.Generator,
    folder: Path,
) -> Case:
    model = models[int(rng.integers(len(models)))]
    engine = str(rng.choice(list(engines)))
    options = engines[engine]
    program = references.program_for(model, references.definition_of(options))
    ops = [op for op in program.flat() if op.kind in kinds and _fits(fault, op)]
    op = ops[int(rng.integers(len(ops)))]
    text = f"{_with_value(fault, op, model, rng)}@{op.id}"
    row, element, truth = effect(model, options, text)
    seen = row > ROOM * TOLERANCE or element > ROOM * ELEMENT_TOLERANCE
    verdict = aligned(model, options, text, folder)
    named = frozenset({verdict.culprit}) if verdict.culprit else frozenset()
    kind = fault.partition(":")[0] if seen else SMALL
    note = f"{text} on {engine}: {row:.2g} of a row, {element:.2g} of a value"
    return Case(kind, frozenset({truth}), named, 1, note=note)


def _clean(
    models: list[PreparedModel],
    engines: dict[str, EngineOptions],
    rng: np.random.Generator,
    folder: Path,
) -> Case:
    model = models[int(rng.integers(len(models)))]
    engine = str(rng.choice(list(engines)))
    verdict = aligned(model, engines[engine], None, folder)
    named = frozenset() if verdict.outcome is Outcome.PASS else frozenset({verdict.headline})
    return Case(CLEAN, frozenset(), named, 1, note=engine)


def _fits(fault: str, op: Op) -> bool:
    """Nobody reads the head's output, so nothing makes up for an error in it."""
    return not (fault.startswith("cancel") and op.id == "head.logits")


def _with_value(fault: str, op: Op, model: PreparedModel, rng: np.random.Generator) -> str:
    """The fault with a random place where it needs one."""
    if fault == "swap-heads":
        return f"{fault}:{int(rng.integers(1, model.hyperparameters.heads))}"
    if fault == "zero-row":
        return f"{fault}:{int(rng.integers(64))}"
    return fault


BENCH = Bench(
    name="accuracy",
    help=f"faults in ops, found beyond {BASE_FACTOR:g} × naive + {TOLERANCE:g} of a row",
    run=run,
    cases=40,
    quick_cases=3,
    targets=(
        *(Target(fault.partition(":")[0], "exact", at_least=1.0) for fault in FAULTS),
        Target(CLEAN, "wrong", at_most=0.0),
        *(Target(f"{emulated.KIND} {core}", "exact", at_least=1.0) for core in emulated.CORES),
        Target(emulated.CLEAN, "wrong", at_most=0.0),
    ),
)
