"""Tests of one's own on virtual boards: the example, a lost link, a restart, a dying worker."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "test_my_boards.py"


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, lab: Any) -> pytest.Pytester:
    """A repository without any test, whose boards are this test's own."""
    del lab  # sets HARNESS_HOME, and ends the boards afterwards
    return pytester


def devices(pytester: pytest.Pytester, boards: str) -> None:
    head = "defaults: {engine: {unit: packed}, threads: 1, pin: none}\nboards:\n"
    pytester.makefile(".yaml", devices=head + boards)


def properties(folder: Path, test: str) -> dict[str, str]:
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        if case.attrib["name"] == test:
            return {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
    raise AssertionError(f"no {test} in the report")


def test_the_example_passes_on_a_virtual_board_and_reports_its_facts(
    elsewhere: pytest.Pytester, model_file: Path, lab: Any
) -> None:
    devices(elsewhere, "  one: {virtual: {}}\n")
    elsewhere.makepyfile(test_my_boards=EXAMPLE.read_text())
    result = elsewhere.runpytest_subprocess(
        "-m", "device", "-k", "my_boards", f"--model={model_file}", "--junit-xml=report.xml",
        timeout=200,
    )  # fmt: skip
    result.assert_outcomes(passed=7)
    told = properties(elsewhere.path, "test_the_same_prompt_gives_the_same_tokens[one]")
    assert told["board"] == "one"
    assert told["machine"]
    assert int(told["cpus"]) > 0
    assert int(told["memory_mb"]) > 0
    assert len(told["engine"]) == 64
    assert told["model"]
    assert not [name for name in told if name.startswith("attempt.")]
    assert lab.spools() == []
    assert lab.leases.held() == []


TROUBLED = """
import threading
from pathlib import Path
import pytest
from harness.deadline import Deadline
from harness.boards import virtual
from harness.farm.decoding import DecodeFailed

pytestmark = pytest.mark.device
SOON = Deadline.after(120, "test")

def first_time(name):
    there = Path(name).exists()
    Path(name).touch()
    return not there

def test_loses_the_link(deployed):
    if first_time("link"):
        deployed.session.transport.close()
        deployed.session.transport.join(5)
        session = deployed.session  # a new connection to the same boot: nothing is lost but time
        threading.Timer(0.5, session.transport.close).start()
        session.run(["sleep", "60"], deadline=SOON)

def test_is_restarted_under(board, deployed):
    before = deployed.facts.boot_id
    if first_time("restart"):
        session = deployed.session
        virtual.provoke(board.name)
        session.transport.join(30)
        deployed.session.run(["true"], deadline=SOON)
    assert deployed.session.run(["test", "-s", deployed.package], deadline=SOON).status == 0
    assert before

def test_an_engine_that_fails_is_a_failure(decode_session):
    with pytest.raises(DecodeFailed, match="vocabulary"):
        decode_session.generate([10 ** 6], max_new=1)
    assert len(decode_session.generate([1, 2], max_new=3).tokens) == 3
"""


def test_a_lost_link_and_a_restart_under_a_test_are_told_and_tried_again(
    elsewhere: pytest.Pytester, model_file: Path, lab: Any
) -> None:
    # The board restarts when the test says so.
    devices(elsewhere, "  one: {virtual: {reboot_at: 3600}}\n")
    elsewhere.makepyfile(test_troubled=TROUBLED)
    result = elsewhere.runpytest_subprocess(
        "-m", "device", "-k", "troubled", f"--model={model_file}", "--junit-xml=report.xml",
        timeout=200,
    )  # fmt: skip
    if "cannot be that virtual board" in result.stdout.str():
        pytest.skip("needs name spaces of its own for a board that restarts")
    result.assert_outcomes(passed=3)
    told = properties(elsewhere.path, "test_loses_the_link[one]")
    assert told["attempt.1"].startswith("error: board-lost: ")
    assert told["attempt.2"] == "passed"
    told = properties(elsewhere.path, "test_is_restarted_under[one]")
    assert told["attempt.1"].startswith("error: board-reset: ")
    assert told["attempt.2"] == "passed"
    assert lab.spools() == []
    assert lab.leases.held() == []


CRASHING = """
import os, threading
import pytest

pytestmark = pytest.mark.device
LONG = [{"prompt": [1, 2], "max_new": 8}] * 50_000

def test_dies_while_the_engine_runs(board, decode_session):
    assert len(decode_session.generate([1, 2], max_new=2).tokens) == 2
    if board.name == "one":
        threading.Timer(3.0, os._exit, [3]).start()
        decode_session.run("generate", {"cases": LONG, "context": 64}, timeout_s=600)

def test_works(decode_session):
    assert len(decode_session.generate([1, 2, 3], max_new=4).tokens) == 4
"""


def test_a_test_that_takes_its_worker_along_leaves_its_board_free_and_clean(
    elsewhere: pytest.Pytester, model_file: Path, lab: Any
) -> None:
    if importlib.util.find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")
    devices(elsewhere, "  one: {virtual: {}}\n  two: {virtual: {}}\n")
    elsewhere.makepyfile(test_crashing=CRASHING)
    result = elsewhere.runpytest_subprocess(
        "-m", "device", "-k", "crashing", f"--model={model_file}", "-n", "auto", timeout=200
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["FAILED *::test_dies_while_the_engine_runs?one?*"])
    assert lab.leases.held() == []
    assert lab.spools() == []
    assert [words for words in lab.processes() if "engine" in words] == []
