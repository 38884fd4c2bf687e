"""Crashes for real on virtual boards: each gets its class, and the command line explains it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.native.build import build_local
from engine.native.compilers import BuildError
from harness.cli.main import app

# Board → what is planted there, engine options, and the class that it has to get.
PLANTED = {
    "overrun": ("overrun:4000000@L01.ffn.down", "unit: native", "out-of-bounds"),
    "killed": ("signal:9@L01.ffn.down", "unit: packed", "killed"),
    "lost": ("lost@L01.ffn.down", "unit: packed, executor: async", "lost-event"),
    "abba": ("abba@L01.ffn.down", "unit: packed", "deadlock"),
}


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        build_local()
    except BuildError as error:
        pytest.skip(f"needs a C compiler: {error}")


def test_planted_crashes_get_their_class_and_can_be_seen_again(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    boards = lab.boards(
        "".join(
            f"  {name}: {{virtual: {{}}, environment: {{ENGINE_FAULT: '{fault}'}}, "
            f"engine: {{{engine}}}}}\n"
            for name, (fault, engine, _) in PLANTED.items()
        )
    )
    lab.options = lab.options.model_copy(update={"stall_seconds": 8.0})
    result = lab.run(boards, stages=["tiny"])
    crashes = {name: result.results[name]["tiny"].verdict.crash for name in PLANTED}
    named = {name: crash.name if crash is not None else None for name, crash in crashes.items()}
    assert named == {name: wanted for name, (_, _, wanted) in PLANTED.items()}, json.dumps(
        result.as_json(), indent=1
    )
    overrun = crashes["overrun"]
    assert overrun.signature.split(" | ")[1] == "SIGSEGV SEGV_MAPERR"
    assert [text for name, text in overrun.facts if name == "frame"][-1].startswith("dn_run")
    assert "killed, cause unknown" in crashes["killed"].headline
    assert "L01.ffn.down, whose end nobody will tell" in crashes["lost"].headline
    assert "_abba" in crashes["abba"].headline

    run = CliRunner().invoke
    listed = json.loads(run(app, ["triage", "--json"]).stdout)
    assert {group["class"] for group in listed} == {wanted for _, _, wanted in PLANTED.values()}
    told = run(app, ["triage", result.results["overrun"]["tiny"].run_id[:13]])
    assert told.exit_code == 1
    assert "Memory out of bounds" in told.stdout and overrun.hash in told.stdout

    monkeypatch.chdir(lab.folder)
    run_id = result.results["overrun"]["tiny"].run_id
    again = run(app, ["triage", run_id, "--again", "2", "--json"])
    assert again.exit_code == 1, again.stderr
    found = json.loads(again.stdout)
    assert (found["shown"], found["tried"]) == (2, 2)
    assert lab.spools() == []
    assert lab.processes() == []
