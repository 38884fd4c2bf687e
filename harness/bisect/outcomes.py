"""A pytest plugin that writes how each test went to a file: `-p harness.bisect.outcomes`.

The file is named by HARNESS_OUTCOMES; a line of JSON for each phase of each test. An exit status
cannot tell a test that failed from a board that was lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import BoardError

VARIABLE = "HARNESS_OUTCOMES"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, Any, Any]:
    report = yield
    if report.outcome != "passed" or report.when == "call":
        error = call.excinfo.value if call.excinfo is not None else None
        trouble = _board_error(error)
        record = {
            "test": item.name.partition("[")[0],
            "when": call.when,
            "outcome": report.outcome,
            "error": type(error).__name__ if error is not None else None,
            "message": str(error).strip().partition("\n")[0][:300] if error is not None else None,
            "trouble": trouble.kind if trouble is not None else None,
        }
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(json.dumps(record) + "\n")
    return report


def _board_error(error: BaseException | None) -> BoardError | None:
    """The board's trouble that an error is, or that it came from."""
    while error is not None:
        if isinstance(error, BoardError):
            return error
        error = error.__cause__ or error.__context__
    return None
