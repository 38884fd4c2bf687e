"""Bring-up on boards of the other architecture: emulated Arm cores, cross-built code, one campaign.

Minutes on hardware are seconds here only because the model is tiny and one stage runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest

from harness.boards.virtual import namespace
from harness.boards.virtual.userland import NoUserland, userland
from harness.farm.results import CampaignResult

# Board → cores, and the instruction set that all of its cores have.
BOARDS = {
    "a53": ("cortex-a53", "neon"),
    "a76": ("cortex-a76", "dotprod"),
    "mixed": ("[cortex-a53, cortex-a76]", "neon"),
}


@pytest.fixture(autouse=True)
def emulation() -> None:
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


@pytest.mark.timeout(900)  # the library is built for the boards, a minute or two, the first time
def test_native_code_is_right_on_boards_of_the_other_architecture(lab: Any) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores, one of each kind")
    boards = lab.boards(
        "".join(
            f"  {name}: {{virtual: {{isa: {cores}}}, engine: {{unit: native}}}}\n"
            for name, (cores, _) in BOARDS.items()
        )
    )
    result = lab.run(boards, stages=["accuracy"])
    for name, (_, kernels) in BOARDS.items():
        assert lab.outcomes(result, name) == {"accuracy": "pass"}, json.dumps(
            result.as_json(), indent=1
        )
        ready = told(lab, result, name)
        assert ready["unit"] == "native"
        assert ready["native"]["isa"] == kernels
        facts = lab.store.campaign_runs(result.id, name)[0].facts
        assert facts["machine"] == "aarch64"
    assert lab.processes() == []


def test_numpy_is_right_on_a_board_of_the_other_architecture(lab: Any) -> None:
    boards = lab.boards("  arm: {virtual: {isa: aarch64}, engine: {unit: packed}}\n")
    result = lab.run(boards, stages=["accuracy"])
    assert lab.outcomes(result, "arm") == {"accuracy": "pass"}, json.dumps(
        result.as_json(), indent=1
    )
    assert told(lab, result, "arm")["unit"] == "packed"
    assert lab.processes() == []
