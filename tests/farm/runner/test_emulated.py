"""Bring-up on boards of the other architecture: emulated Arm cores, cross-built code, one campaign.

Minutes on hardware are seconds here only because the model is tiny and one stage runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from harness.boards.virtual import namespace
from harness.boards.virtual.userland import NoUserland, userland
from harness.deploy.models import PreparedModel, prepare_model
from harness.farm.results import CampaignResult

# Board → cores, unit, and the instruction set that all of its cores have.
BOARDS = {
    "a53": ("cortex-a53", "native", "neon"),
    "a76": ("cortex-a76", "native", "dotprod"),
    "mixed": ("[cortex-a53, cortex-a76]", "native", "neon"),
    "numpy": ("aarch64", "packed", None),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """Quantised, so that the kernels of each instruction set are what runs."""
    source = SyntheticCheckpoint(seed=5, width=128, ffn=256, heads=4, kv_heads=2)
    kinds = {"ffn_down": "Q8_0", "attn_output": "Q4_1"}
    matrices = [name for name in source.tensors if "norm" not in name]
    types = {
        name: next((kind for part, kind in kinds.items() if part in name), "Q4_0")
        for name in matrices
    }
    path = tmp_path_factory.mktemp("model") / "quantised.gguf"
    write_gguf(source, path, types=types)
    return prepare_model(path)


@pytest.fixture(autouse=True)
def emulation() -> None:
    """The boards of this module can be had here."""
    if not namespace.supported():
        pytest.skip("needs mount namespaces for this user")
    try:
        userland()
    except NoUserland as error:
        pytest.skip(f"needs an emulated userland: {error}")


def told(lab: Any, result: CampaignResult, board: str) -> Mapping[str, Any]:
    """What the engine said of itself when it was ready."""
    (row,) = lab.store.campaign_runs(result.id, board)
    events = (lab.home / "raw" / row.id / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in events]
    ready: Mapping[str, Any] = next(item["data"] for item in found if item["kind"] == "ready")
    return ready


def tell(result: CampaignResult) -> str:
    return json.dumps(result.as_json(), indent=1)


@pytest.mark.timeout(900)  # the library is built for the boards, a minute or two, the first time
def test_the_engine_is_right_on_boards_of_the_other_architecture(lab: Any) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores, one of each kind")
    text = "".join(
        f"  {name}: {{virtual: {{isa: {cores}}}, engine: {{unit: {unit}}}}}\n"
        for name, (cores, unit, _) in BOARDS.items()
    )
    result = lab.run(lab.boards(text), stages=["accuracy"])
    for name, (_, unit, kernels) in BOARDS.items():
        assert lab.outcomes(result, name) == {"accuracy": "pass"}, tell(result)
        ready = told(lab, result, name)
        assert ready["unit"] == unit
        assert (ready["native"] or {}).get("isa") == kernels
        assert lab.store.campaign_runs(result.id, name)[0].facts["machine"] == "aarch64"
    assert lab.processes() == []


@pytest.mark.timeout(900)  # as above
def test_kernels_for_a_better_core_die_on_a_lesser_one_and_the_instruction_is_named(
    lab: Any,
) -> None:
    board = "{virtual: {isa: cortex-a53}, engine: {unit: native, kernels: dotprod}}"
    result = lab.run(lab.boards(f"  a53: {board}\n"), stages=["accuracy"])
    assert lab.outcomes(result, "a53") == {"accuracy": "fail"}, tell(result)
    verdict = result.results["a53"]["accuracy"].verdict
    assert "SIGILL" in verdict.headline
    assert told(lab, result, "a53")["native"]["missing"] == ["asimddp"]
    # The bytes at the program counter, read by the symbols of the library that was sent there.
    crash = verdict.crash
    assert crash is not None, verdict
    assert crash.name == "illegal-instruction"
    assert "needs dotprod, which the cores lack" in crash.headline
    assert "sdot in dot4s in int8_DN_Q4 (neon.h:" in crash.headline, crash
    assert "-mcpu=generic+v8_2a+dotprod" in crash.sentence
    assert "-march=armv8.2-a+dotprod" in crash.sentence
    assert verdict.culprit == crash.op and crash.op.startswith("L00.")
    facts = dict(crash.facts)
    assert facts["extension"].startswith("dotprod (asimddp")
    assert [text for name, text in crash.facts if name == "frame"][-1].startswith("dn_run")
