"""What two runs must have in common to be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from harness.boards.facts import Facts
from harness.deploy.models import PreparedModel, prepare_model
from harness.deploy.push import Deployment
from harness.farm.keys import power_mode, quant_hash, toolchain_name
from harness.farm.placing import Placed
from harness.inventory import Board
from harness.store import RunRow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


def model(folder: Path, seed: int, ffn: int = 128) -> PreparedModel:
    path = folder / f"{seed}-{ffn}.gguf"
    write_gguf(SyntheticCheckpoint(seed=seed, ffn=ffn), path)
    return prepare_model(path)


def test_quantisation_is_told_apart_from_the_weights_themselves(tmp_path: Path) -> None:
    one, other = model(tmp_path, seed=1), model(tmp_path, seed=2)
    assert one.sha256 != other.sha256
    assert quant_hash(one) == quant_hash(other) is not None
    assert quant_hash(model(tmp_path, seed=1, ffn=64)) != quant_hash(one)


def test_layouts_of_the_same_weights_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(SyntheticCheckpoint(seed=4), path, types={"blk.0.ffn_up.weight": "Q4_0"})
    blocked, interleaved = (prepare_model(path, layout=name) for name in ("blocked", "interleaved"))
    assert quant_hash(blocked) != quant_hash(interleaved)


def test_a_package_that_is_gone_has_no_quantisation(tmp_path: Path) -> None:
    found = model(tmp_path, seed=3)
    found.package.unlink()
    assert quant_hash(found) is None


def test_toolchains_are_told_in_a_line() -> None:
    zig = {"kind": "zig", "target": "aarch64-linux-gnu.2.31", "cpu": "cortex_a76"}
    board = Board.model_validate({"name": "a", "host": "h", "toolchain": zig})
    assert toolchain_name(board) == "zig aarch64-linux-gnu.2.31 cortex_a76"
    assert toolchain_name(Board(name="b", host="h")) is None


def test_the_power_mode_is_what_governs_the_clocks() -> None:
    assert power_mode(Facts(machine="aarch64", kernel="Linux 6", governor="schedutil")) == (
        "schedutil"
    )
    assert power_mode(Facts(machine="aarch64", kernel="Linux 6")) is None
    assert power_mode(None) is None


def test_a_run_is_looked_for_where_it_was_begun_not_where_the_next_would_be() -> None:
    deployment = Deployment("/now", ("python3",), {}, {})
    placed = Placed(Facts(machine="x", kernel="Linux 6"), "e", deployment)
    begun = placed.run_of(RunRow(id="r", remote_spool="/before/runs/r"))
    assert (begun.spool, begun.deployment.root) == ("/before/runs/r", "/before")
    planned = placed.run_of(RunRow(id="r", remote_spool=None))
    assert (planned.spool, planned.deployment) == ("/now/runs/r", deployment)
