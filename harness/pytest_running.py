"""How device tests run: again when their board was lost, and side by side with pytest-xdist.

A part of harness.pytest_plugin, which pytest loads with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import pytest

from harness.pytest_plugin import SESSION, asked_by_marker, board_of, is_stage, selection

WORKERS_PER_CPU = 8  # with -n auto: device tests mostly wait for their boards
ATTEMPT = "attempt."  # of a report's properties: attempt.1, attempt.2, …


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With -n auto: a worker for each board, where device tests are asked for."""
    boards = selection(config).boards if asked_by_marker(config) else ()
    return min(len(boards), WORKERS_PER_CPU * (os.cpu_count() or 1)) or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A board's tests stay with one worker, where device tests are asked for."""
    if not asked_by_marker(config) or config.getoption("dist") not in ("load", "loadgroup"):
        return None
    from harness.farm.spreading import BoardScheduling

    return BoardScheduling(config, log, [board.name for board in selection(config).boards])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and _is_own(item):
        from harness.farm import attempts

        attempts.mark(report, call.excinfo.value)
    return report


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs tests of one's own on a board again when it was lost. Stages see to it themselves."""
    if not _is_own(item):
        return None
    from harness.farm import attempts

    board = board_of(item)
    if board:
        item.user_properties.append(("board", board))

    def prepared() -> list[str]:
        session = item.config.stash.get(SESSION, None)
        return session.drain(board) if session is not None else []

    def renew() -> None:
        from harness.errors import HarnessError

        session = item.config.stash.get(SESSION, None)
        with contextlib.suppress(HarnessError):  # the next try meets it again, and tells it
            if session is not None:
                session.renew(board)

    attempts.run(item, nextitem, item.config.getoption("device_retries"), prepared, renew)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Facts of the board into the report, before a test that may take the process along."""
    from_fixture = getattr(item, "funcargs", {}).get("deployed")
    if from_fixture is not None and _is_own(item):
        from harness.cli.output import visible

        told = from_fixture.properties()
        item.user_properties += [
            (name, visible(str(value))) for name, value in told.items() if name != "board"
        ]


def _is_own(item: pytest.Item) -> bool:
    """Whether it is a device test on one of our boards, but no stage."""
    return bool(item.get_closest_marker("device") and not is_stage(item) and board_of(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was tried again, passed or not."""
    found: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            tries = [
                str(value)
                for name, value in getattr(report, "user_properties", ())
                if str(name).startswith(ATTEMPT)
            ]
            if tries:
                found[report.nodeid] = tries
    if not found:
        return
    terminalreporter.write_sep("=", "tried again, since the board was lost")
    for nodeid, tries in sorted(found.items()):
        for number, text in enumerate(tries, 1):
            terminalreporter.write_line(f"{nodeid} attempt {number}: {text}")
