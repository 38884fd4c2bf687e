"""`harness compare` as a user gives it, on a virtual board."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import engine
from harness.deploy.kept import keep


def test_a_slow_op_in_b_is_worse_and_the_board_is_left_clean(
    lab: Any, model_file: Path, tmp_path: Path
) -> None:
    lab.boards("  one: {virtual: {}, engine: {unit: packed}}\n")
    sources = tmp_path / "engine"
    shutil.copytree(Path(engine.__file__).parent, sources)
    (sources / "planted.py").write_text("# another engine than this checkout's\n")
    other = keep(sources)
    command = lab.command(
        "compare", f"engine={other[:12]}", "env=ENGINE_FAULT=slow:20@L01.ffn.up",
        f"--model={model_file}",
        "--metric=tpot", "--pairs=8", "--most=8", "--depth=8", "--tokens=6", "--repeats=1",
        "--json",
    )  # fmt: skip
    code, found = command.finish()
    assert (code, found["verdict"]) == (1, "worse"), found
    assert found["metrics"]["tpot_s"]["ratio"] > 1.5
    assert found["pairs"] == 8
    differs = {name: (a, b) for name, a, b in found["difference"]}
    assert differs["env ENGINE_FAULT"] == ("–", "slow:20@L01.ffn.up")
    assert differs["engine"] == (f"engine {other[:8]}", "this checkout")
    assert found["clocks"]["state"] == "unknown"  # its host's
    assert "the noise of one is not known yet" in command.log.read_text()
    _, plan = lab.command("compare", ".", ".", "--plan", "--metric=tpot", "--json").finish()
    assert plan["plans"]["tpot_s"]["minutes"] > 0  # from the pairs that were made
    assert lab.spools() == []
    assert lab.leases.held() == []
