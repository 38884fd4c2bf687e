"""The bring-up as tests: one per board and stage. See harness.pytest_plugin."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from harness.cli.output import visible
from harness.verdicts import Outcome

if TYPE_CHECKING:
    from harness.farm.results import StageResult


class StageWarning(UserWarning):
    """A stage passed, but something about it deserves a look."""


@pytest.mark.device
def test_stage(stage_result: StageResult) -> None:
    """The stage passed, or passed with warnings."""
    text = visible("\n".join(stage_result.explain()))
    if stage_result.outcome is Outcome.WARN:
        warnings.warn(text, StageWarning, stacklevel=1)
    if not stage_result.outcome.lets_next_stage_run:
        pytest.fail(text, pytrace=False)
