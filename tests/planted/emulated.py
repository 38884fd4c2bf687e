"""Accuracy faults on emulated boards of the other architecture, by the campaign of `align`."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from harness.boards import virtual
from harness.boards.virtual import namespace
from harness.boards.virtual.userland import NoUserland, userland
from harness.farm.progress import Silent
from harness.farm.runner import Resume, bringup
from harness.farm.selection import bringup_options, choose_boards, choose_stages
from harness.store import Store
from harness.verdicts import Outcome
from tests.planted.aligned_here import POSITIONS, ROWS, TEXT, small_model
from tests.planted.cases import Case, Context

CORES = ("cortex-a53", "cortex-a76")
KIND, CLEAN = "emulated", "clean control, emulated"
# Fault → the op of the fused program that is to be named.
FAULTS = {
    "scale:1.02@L01.ffn.down": "L01.ffn.down",
    "swap-heads:1@L00.attn.mix": "L00.attn.mix",
    "zero-point:1@L01.ffn.up": "L01.ffn.gate_up",
    "stale@L01.attn.kv": "L01.attn.mix",
}


def cases(context: Context) -> Iterator[Case]:
    """Every fault on each core, one board after the other, and a clean control."""
    try:
        if not namespace.supported():
            raise NoUserland("this user has no mount namespaces")
        userland()
    except NoUserland as error:
        context.tell(f"accuracy: without emulated boards: {error}")
        return
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        before = os.environ.get("HARNESS_HOME")
        os.environ["HARNESS_HOME"] = f"{name}/home"
        try:
            for core in CORES:
                yield from _on(core, Path(name), context)
        finally:
            virtual.stop_all()
            if before is None:
                del os.environ["HARNESS_HOME"]
            else:
                os.environ["HARNESS_HOME"] = before


def _on(core: str, folder: Path, context: Context) -> Iterator[Case]:
    farm = folder / f"{core}.yaml"
    farm.write_text(
        f"defaults: {{threads: 1, pin: none}}\nboards:\n  {core}: {{virtual: {{isa: {core}}}, "
        "engine: {unit: native}}\n"
    )
    model = small_model(context.seed, folder)
    options = bringup_options(
        accuracy_tokens=TEXT, accuracy_positions=POSITIONS, accuracy_rows=ROWS
    )
    with Store.open() as store:
        for fault, truth in [*FAULTS.items(), (None, None)]:
            added = [f"{core}:ENGINE_FAULT={fault}"] if fault else []
            result = bringup(
                choose_boards(farm, (), (), added),
                model,
                options,
                store,
                Silent(),
                stop=threading.Event(),
                stages=choose_stages(["accuracy"]),
                resume=Resume.NEVER,
                kind="align",
            )
            verdict = result.results[core]["accuracy"].verdict
            if truth is None:
                good = verdict.outcome is Outcome.PASS
                named = frozenset() if good else frozenset({verdict.headline})
                yield Case(CLEAN, frozenset(), named, 1, note=core)
            else:
                named = frozenset({verdict.culprit}) if verdict.culprit else frozenset()
                yield Case(f"{KIND} {core}", frozenset({truth}), named, 1, note=fault or "")
