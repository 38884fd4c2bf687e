"""`pytest -m device` from another repository, on virtual boards."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from harness.store import CampaignRow

DEADLINE = "from harness.deadline import Deadline\n\nSOON = Deadline.after(60, 'test')\n"


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, lab: Any) -> pytest.Pytester:
    """A repository without any test, whose boards are this test's own."""
    del lab  # sets HARNESS_HOME, and ends the boards afterwards
    return pytester


def devices(pytester: pytest.Pytester, boards: str) -> None:
    """Boards with the numpy engine: how it runs is not what these tests are about."""
    head = "defaults: {engine: {unit: packed}}\nboards:\n"
    pytester.makefile(".yaml", devices=head + boards)


def properties(case: ElementTree.Element) -> dict[str, str]:
    return {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}


def test_stages_of_all_boards_are_reported_as_passes_failures_errors_and_skips(
    elsewhere: pytest.Pytester, model_file: Path
) -> None:
    devices(
        elsewhere,
        "  good: {virtual: {}}\n"
        "  sick: {virtual: {}, environment: {ENGINE_FAULT: 'scale:1.02@L02.ffn.down'}}\n"
        "  bare: {virtual: {no_python: true}}\n",
    )
    result = elsewhere.runpytest_subprocess(
        "-m", "device", "-k", "tiny or accuracy", "--model", str(model_file), "-v", "-rs",
        "--junit-xml", "report.xml", timeout=200,
    )  # fmt: skip
    result.assert_outcomes(passed=3, failed=1, errors=1, skipped=1, deselected=6)
    result.stdout.fnmatch_lines_random(
        [
            "*test_stage?good-accuracy? PASSED*",
            "*test_stage?sick-accuracy? FAILED*",
            "*test_stage?bare-tiny? ERROR*",
            "SKIPPED * blocked by tiny",
            "*sick accuracy FAIL: *",
            "*first wrong op: L02.ffn.down",
            "*bare tiny ERROR (no-python): *",
        ]
    )
    cases = {
        case.attrib["name"]: case
        for case in ElementTree.parse(elsewhere.path / "report.xml").iter("testcase")
    }
    told = properties(cases["test_stage[good-accuracy]"])
    assert (told["board"], told["stage"], told["outcome"]) == ("good", "accuracy", "pass")
    assert told["machine"]
    assert int(told["cpus"]) > 0
    assert told["python"].startswith("3.")
    assert properties(cases["test_stage[bare-tiny]"])["outcome"] == "error"


OWN = (
    DEADLINE
    + """
import pytest

@pytest.mark.device
def test_engine_is_there(board, deployed):
    command = [*deployed.python, "-c", "import engine, numpy; print(numpy.ones(3).sum())"]
    assert deployed.session.run(command, deadline=SOON, check=True).stdout == b"3.0\\n"
    assert deployed.session.run(["test", "-s", deployed.package], deadline=SOON).status == 0
    assert deployed.board is board

@pytest.mark.device
def test_prints_what_no_xml_may_hold(deployed, record_property):
    said = deployed.session.run("printf 'a\\\\000b\\\\033[31mc\\\\377]]>'", deadline=SOON).stdout
    assert b"\\x1b" in said and b"\\0" in said
    record_property("said", said.decode("latin-1"))
    print(said.decode("latin-1"))
    pytest.fail(said.decode("latin-1"))
"""
)


def test_own_tests_get_a_deployed_board_and_any_output_gives_readable_junit(
    elsewhere: pytest.Pytester, model_file: Path
) -> None:
    devices(elsewhere, "  one: {virtual: {}}\n")
    elsewhere.makepyfile(test_own=OWN)
    result = elsewhere.runpytest_subprocess(
        "test_own.py", "--model", str(model_file), "--junit-xml", "report.xml", timeout=120
    )
    result.assert_outcomes(passed=1, failed=1)
    report = ElementTree.parse(elsewhere.path / "report.xml")
    assert len(list(report.iter("failure"))) == 1


DYING = """
import os, signal
import pytest

@pytest.mark.device
def test_dies(deployed):
    {death}
"""


def test_a_test_that_kills_its_process_leaves_the_board_free_for_the_next(
    elsewhere: pytest.Pytester, model_file: Path, lab: Any
) -> None:
    devices(elsewhere, "  one: {virtual: {}}\n")
    model = ["--model", str(model_file)]
    for death, code in (("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGSEGV)", -11)):
        elsewhere.makepyfile(test_dying=DYING.format(death=death))
        dead = elsewhere.runpytest_subprocess("test_dying.py", *model, timeout=120)
        assert dead.ret == code
        assert lab.leases.holder("one") is None
    again = elsewhere.runpytest_subprocess("-m", "device", "-k", "tiny", *model, timeout=120)
    again.assert_outcomes(passed=1, deselected=4)


DYING_IN_A_WORKER = """
import os, signal
import pytest

@pytest.mark.device
def test_exits(deployed):
    os._exit(3)

@pytest.mark.device
def test_breaks(deployed):
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.device
def test_works(deployed):
    assert deployed.session.alive
"""


@pytest.fixture
def workers() -> None:
    if importlib.util.find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")


@pytest.mark.usefixtures("workers")
def test_in_a_worker_a_test_that_kills_its_process_fails_by_name_and_the_next_gets_the_board(
    elsewhere: pytest.Pytester, model_file: Path, lab: Any
) -> None:
    devices(elsewhere, "  one: {virtual: {}}\n")
    elsewhere.makepyfile(test_dying=DYING_IN_A_WORKER)
    arguments = ["test_dying.py", "--model", str(model_file), "-n", "1"]
    result = elsewhere.runpytest_subprocess(*arguments, timeout=120)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines_random(
        ["FAILED test_dying.py::test_exits?one?*", "FAILED test_dying.py::test_breaks?one?*"]
    )
    first = elsewhere.runpytest_subprocess(*arguments, "--max-worker-restart=0", timeout=120)
    first.assert_outcomes(failed=1)
    first.stdout.fnmatch_lines(["FAILED test_dying.py::test_exits?one?*"])
    assert lab.leases.held() == []


@pytest.mark.usefixtures("workers")
def test_workers_share_the_boards_out_and_each_board_stays_with_one(
    elsewhere: pytest.Pytester, model_file: Path, lab: Any
) -> None:
    devices(elsewhere, "  one: {virtual: {}}\n  two: {virtual: {}}\n")
    elsewhere.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.device
        def test_mine(board, deployed):
            assert deployed.board is board
        """
    )
    model = ["--model", str(model_file)]
    spread = ["-n", "2", "--dist=loadgroup", "-v", "-k", "tiny or mine"]
    result = elsewhere.runpytest_subprocess("-m", "device", *model, *spread, timeout=200)
    result.assert_outcomes(passed=4)
    seen = re.findall(r"^\[(gw\d)\].* PASSED .*\[(one|two)[\]-]", result.stdout.str(), re.M)
    assert len(seen) == 4
    assert len(set(seen)) == len({board for _, board in seen}) == 2
    # Each campaign has the one board that its worker ran, and is closed.
    with lab.store.database.reading() as session:
        campaigns = session.scalars(sa.select(CampaignRow)).all()
    assert [row.outcome for row in campaigns] == ["pass", "pass"]
    assert all(row.finished_at for row in campaigns)
    assert lab.leases.held() == []
    assert lab.processes() == []
