"""The accuracy stage in this process: plan, the board's part with a planted fault, verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.measure import alignment
from engine.measure.context import JobContext
from engine.measure.worker import describe
from engine.options import EngineOptions
from engine.package import Package
from engine.program.ops import Op
from engine.records import Event
from engine.runtime.cache import KVCache
from engine.units.faulty import plant
from engine.units.reference import Reference
from harness.boards.facts import Facts
from harness.deploy.models import PreparedModel, in_layout, prepare_model
from harness.inventory import Board
from harness.jobs import accuracy, references
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.comparison import as_rows, output_of, relative_rows, worst_element
from harness.jobs.engines import EngineChoice, layout_of
from harness.jobs.runlog import RunLog
from harness.verdicts import Verdict

FAULT = "ENGINE_FAULT"
POSITIONS, ROWS, TEXT = 24, 4, 12  # as few as show every kind of fault


def small_model(seed: int, folder: Path) -> PreparedModel:
    """Two layers whose weights are integers, some with a zero point and some with a minimum."""
    path = folder / f"planted-{seed}.gguf"
    if not path.exists():
        source = SyntheticCheckpoint(seed=seed, width=128, ffn=256, heads=4, kv_heads=2)
        kinds = {"ffn_down": "Q8_0", "attn_output": "Q4_1"}
        matrices = [name for name in source.tensors if "norm" not in name]
        types = {
            name: next((kind for part, kind in kinds.items() if part in name), "Q4_0")
            for name in matrices
        }
        write_gguf(source, path, types=types)
    return prepare_model(path)


def aligned(
    model: PreparedModel, options: EngineOptions, fault: str | None, folder: Path
) -> Verdict:
    """What the accuracy stage says of an engine with a fault, or without."""
    model = in_layout(model, layout_of(options.unit))
    context = StageContext(
        board=Board(name="here", host="192.0.2.1"),
        facts=Facts(machine="here", kernel="Linux"),
        model=model,
        options=BringupOptions(
            accuracy_tokens=TEXT, accuracy_positions=POSITIONS, accuracy_rows=ROWS
        ),
        run_id="run-1",
        remote_package=str(model.package),
        cache=folder,
        engine=EngineChoice(options),
    )
    plan = accuracy.STAGE.plan(context)
    spec = dataclasses.replace(plan.spec, inputs=str(plan.inputs))
    told: list[tuple[str, Mapping[str, Any]]] = [
        ("run-start", {"run_id": "run-1"}),
        ("engine-start", {"attempt": 0, "pid": 1}),
        ("ready", {"attempt": 0}),
    ]
    code = 0
    with Package.open(model.package) as package, planted(fault):
        job = JobContext(
            spec, package, folder, 0, time.monotonic_ns(), lambda *e: told.append(e), options
        )
        try:
            alignment.run(job)
        except ArithmeticError as error:
            traceback.clear_frames(error.__traceback__)
            told.append(("error", describe(error)))
            code = 1
    told.append(("engine-exit", {"attempt": 0, "planned": False, "code": code}))
    told.append(("run-end", {"status": "finished"}))
    events = [Event(n, n, kind, dict(data)) for n, (kind, data) in enumerate(told)]
    return accuracy.STAGE.judge(context, RunLog("run-1", events, folder, "finished", ""))


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """The fault in this process's environment, for as long as the board's part runs."""
    before = os.environ.pop(FAULT, None)
    try:
        if fault:
            os.environ[FAULT] = fault
        yield
    finally:
        os.environ.pop(FAULT, None)
        if before is not None:
            os.environ[FAULT] = before


def effect(model: PreparedModel, options: EngineOptions, fault: str) -> tuple[float, float, str]:
    """How much a fault changes what an op of the program writes, in exact arithmetic: of a row's
    norm, of one value in units of its size, and which op of the program it is.

    Independent of any engine and rule: the reference in float64 with the fault, on its own inputs.
    """
    definition = references.definition_of(options)
    count = min(POSITIONS, model.hyperparameters.context - 1)
    tokens = np.arange(count) * 7 % model.hyperparameters.vocab
    rows = references.spread_rows(count, ROWS)
    right = references.aligned(model, definition, tokens, rows)
    program = references.program_for(model, definition)
    op_id = fault.partition("@")[2].partition("?")[0]
    op = next(op for op in program.ops if op.inner(op_id) is not None)
    with Package.open(model.package) as package:
        unit = plant(Reference(package, count, np.float64), fault)
        hp = package.hyperparameters
        like = KVCache(
            hp.layers, 1, hp.kv_heads, hp.head_dim,
            scheme=definition.kv, layout=definition.kv_layout, dtype=np.float64,
        )  # fmt: skip
        with np.load(
            references.alignment_inputs(
                model, definition, tokens, rows, [1], np.zeros((0, 0), np.int64)
            )
        ) as file:
            given = {name: file[name] for name in file.files}
        found = alignment.local_run(
            program,
            unit,
            like,
            tokens,
            rows,
            alignment.with_prefix(given, alignment.BUFFER),
            alignment.with_prefix(given, alignment.CACHE),
            pieces=alignment.single_steps(rows),
        )
    return (*_difference(op, found.buffers, right.reference), op.id)


def _difference(op: Op, found: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[float, float]:
    got, want = output_of(op, found, right), output_of(op, right, right)
    if got is None or want is None:
        return float("inf"), float("inf")
    a, b = as_rows(got), as_rows(want)
    if not np.isfinite(a).all():
        return float("inf"), float("inf")
    return float(relative_rows(a - b, b).max()), worst_element(a - b, b)[0]
