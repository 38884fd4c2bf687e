"""The bring-up as tests: one per board and stage. See harness.pytest_plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.cli.output import visible

if TYPE_CHECKING:
    from harness.farm.results import StageResult


@pytest.mark.device
def test_stage(stage_result: StageResult) -> None:
    """The stage passed, or passed with warnings."""
    if not stage_result.outcome.lets_next_stage_run:
        pytest.fail(visible("\n".join(stage_result.explain())), pytrace=False)
