"""The scale benchmark at its smallest: two boards, the contestants that need nothing installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.bench.benches import scale
from tests.bench.context import Bench
from tests.bench.protocol import Worker


def test_everybody_reaches_every_board_with_every_task(tmp_path: Path) -> None:
    bench = Bench("scale", 1, 1, True, True, tmp_path, lambda text: None)
    with scale.started(2, tmp_path) as fleet:
        workers: dict[str, Worker] = {}
        try:
            workers = {name: scale._worker(bench, name) for name in (scale.OURS, "fabric")}
            assert scale.warm_up(fleet, workers) == [1, 1]
            before = fleet.null.counts()
            took = scale.once(fleet, workers["fabric"])
            after = fleet.null.counts()
        finally:
            for worker in workers.values():
                worker.close()
    assert set(took) == set(scale.TITLES)
    for name, counts in after.items():
        # Logging in is proved by `true`; then the three tasks.
        assert counts.connections - before[name].connections == 1
        assert counts.commands - before[name].commands == 4


def test_the_command_of_a_deployment_asks_what_ours_asks(tmp_path: Path) -> None:
    line = scale.deploy_command(tmp_path, "python3").replace("~/work", str(tmp_path / "work"))
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True, cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["root"] == str(tmp_path / "work")
    assert answer["have"] == []


def test_a_deployment_that_asks_twice_misses_its_target() -> None:
    assert scale.asked_row("scale", 2, [1, 1]).verdict == "reached"
    assert scale.asked_row("scale", 2, [1, 2]).verdict == "missed"
