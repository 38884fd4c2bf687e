"""Tests of one's own on a board that is lost: an ERROR, tried again, with every try on record.

A failure is never tried again, so no try can turn one into a pass. What counts as the board's
trouble inside a test is narrow: the board did not answer, or was reset. A command that does not end
in time, or ends with another status, may be what the test is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from harness.errors import BoardError
from harness.pytest_running import ATTEMPT

LOST = ("unreachable", "board-lost", "board-reset")  # kinds of a BoardError
TROUBLE = "device_trouble"  # the attribute of a report that tells it


def mark(report: pytest.TestReport, error: BaseException) -> None:
    """Turns a test that lost its board into an ERROR. Reports know errors of set-up alone."""
    if isinstance(error, BoardError) and error.kind in LOST:
        setattr(report, TROUBLE, f"{error.kind}: {error}")
        if report.when == "call":
            report.when = "setup"


def trouble_of(reports: Iterable[pytest.TestReport]) -> str | None:
    """The board's trouble, where nothing else went wrong."""
    failed = [report for report in reports if report.failed]
    told = [str(getattr(report, TROUBLE, "")) for report in failed]
    return told[0] if told and all(told) else None


def outcome_of(reports: Sequence[pytest.TestReport]) -> str:
    """One word for a try, and what the board's trouble was."""
    trouble = trouble_of(reports)
    if trouble is not None:
        return f"error: {trouble}"
    for report in reports:
        if report.failed:
            return "failed" if report.when == "call" else "error"
        if report.skipped:
            return "skipped"
    return "passed"


def run(
    item: pytest.Item,
    nextitem: pytest.Item | None,
    retries: int,
    prepared: Callable[[], Sequence[str]],
    renew: Callable[[], None],
) -> None:
    """Runs the test, and again up to `retries` times while the board is its only trouble.

    `prepared` tells, and forgets, what went wrong before the board was there; `renew` gets it ready
    for another try. The reports of the last try count, and carry the tries before it.
    """
    from _pytest.runner import runtestprotocol  # what plugins that run a test again all use

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    given, told = list(item.user_properties), [*prepared()]
    for number in range(retries + 1):
        item.user_properties[:] = given
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        told += prepared()
        trouble = trouble_of(reports)
        if trouble is None or number == retries or item.session.shouldstop:
            break
        told.append(trouble)
        renew()
    if told:
        tries = [*(f"error: {text}" for text in told), outcome_of(reports)]
        record = [(f"{ATTEMPT}{at}", text) for at, text in enumerate(tries, 1)]
        for report in reports:
            report.user_properties = [*report.user_properties, *record]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
