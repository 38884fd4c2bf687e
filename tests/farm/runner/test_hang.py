"""The real engine hangs on a board: it is ended, and the verdict shows where it stood."""

from __future__ import annotations

from typing import Any


def test_an_engine_that_spins_and_one_that_waits_for_a_lock_fail_with_their_stacks(
    lab: Any,
) -> None:
    boards = lab.boards(
        "".join(
            f"  {kind}: {{virtual: {{}}, environment: {{ENGINE_FAULT: '{kind}@L01.ffn.down'}}}}\n"
            for kind in ("spin", "block")
        )
    )
    lab.options = lab.options.model_copy(update={"stall_seconds": 8.0})
    result = lab.run(boards, stages=["tiny"])
    assert result.exit_code == 1
    for kind in ("spin", "block"):
        item = result.results[kind]["tiny"]
        assert (item.outcome.value, item.attempts) == ("fail", 1)
        assert "hangs in faulty.py:" in item.verdict.headline
        assert f"_{kind}: silent for" in item.verdict.headline
        (check,) = item.verdict.checks
        assert (check.name, check.measured) == ("makes_progress", "hung")
        assert f"in _{kind}" in check.sentence
        assert "state R" in check.sentence if kind == "spin" else "state S" in check.sentence
        whole = (lab.store.raw_folder(item.run_id) / "stacks.0.log").read_text()
        assert "tiny.py" in whole  # the frames below are there too
    assert lab.spools() == []
    assert lab.processes() == []
