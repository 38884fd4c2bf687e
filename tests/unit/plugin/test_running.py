"""How tests of one's own on boards run: what is tried again, what is told, and xdist's workers.

The boards of these tests are far away; what happens on them is said by the tests themselves.
"""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree

import pytest

FARM = f"""
boards:
  far-1: {{host: 192.0.2.1, host_key: "SHA256:{"A" * 43}"}}
  far-2: {{host: 192.0.2.2, host_key: "SHA256:{"B" * 42 + "A"}"}}
"""

# Each test notes that it ran; `lose` is what a lost connection does to it.
HEAD = """
import os
import signal
from pathlib import Path
import pytest
from harness.errors import BoardError

pytestmark = pytest.mark.device

def count(name):
    with Path(name).open("a") as file:
        file.write("x")
    return Path(name).stat().st_size

def lose(board, kind="board-lost"):
    raise BoardError(board.name, kind, "it fell silent")
"""


@pytest.fixture
def lab(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("HARNESS_STRICT", raising=False)
    pytester.makefile(".yaml", devices=FARM)
    return pytester


def run(lab: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    lab.makepyfile(test_own=HEAD + tests)
    wanted = ["-m", "device", "-k", "test_own", "--junit-xml", "report.xml", *arguments]
    return lab.runpytest_subprocess(*wanted, timeout=280)


def runs_of(lab: pytest.Pytester, name: str) -> int:
    return (lab.path / name).stat().st_size


class Case:
    """What the report says of one test: outcomes that are not good, and properties."""

    def __init__(self, lab: pytest.Pytester, name: str) -> None:
        cases = ElementTree.parse(lab.path / "report.xml").iter("testcase")
        mine = [case for case in cases if case.attrib["name"] == name]
        self.bad = [item.tag for case in mine for item in case if item.tag in ("failure", "error")]
        self.told = {
            item.attrib["name"]: item.attrib["value"]
            for case in mine
            for item in case.iter("property")
        }
        self.tries = [text for key, text in self.told.items() if key.startswith("attempt.")]


LOSING = """
def test_loses_it_once(board):
    if count("once") == 1:
        lose(board)

def test_never_has_it(board):
    count("never")
    lose(board, "board-reset")

def test_is_lost_then_fails(board):
    if count("then fails") == 1:
        lose(board)
    assert False, "wrong number"

def test_fails(board):
    assert count("fails") == 2

def test_fails_and_is_lost_afterwards(board, request):
    request.addfinalizer(lambda: lose(board))
    assert count("afterwards") == 2

@pytest.mark.parametrize("kind", ["timeout", "protocol"])
def test_may_be_about_its_command(board, kind):
    count(kind)
    lose(board, kind)

def test_says_itself_what_a_lost_board_is(board):
    count("itself")
    try:
        lose(board)
    except BoardError:
        pytest.fail("not allowed")
"""


def test_only_a_lost_board_is_tried_again_and_every_try_is_told(lab: pytest.Pytester) -> None:
    result = run(lab, LOSING, "--boards=far-1")
    result.assert_outcomes(passed=1, failed=6, errors=2)

    once = Case(lab, "test_loses_it_once[far-1]")
    assert (once.bad, once.told["board"], runs_of(lab, "once")) == ([], "far-1", 2)
    assert once.tries[0].startswith("error: board-lost: board far-1: it fell silent")
    assert once.tries[1:] == ["passed"]
    result.stdout.fnmatch_lines(
        [
            "*tried again, since the board was lost*",
            "*test_loses_it_once?far-1? attempt 1: error: board-lost: *",
            "*test_loses_it_once?far-1? attempt 2: passed",
        ]
    )
    never = Case(lab, "test_never_has_it[far-1]")
    assert (never.bad, runs_of(lab, "never")) == (["error"], 2)
    assert [text[:18] for text in never.tries] == ["error: board-reset"] * 2

    then = Case(lab, "test_is_lost_then_fails[far-1]")
    assert (then.bad, then.tries[-1], runs_of(lab, "then fails")) == (["failure"], "failed", 2)

    afterwards = Case(lab, "test_fails_and_is_lost_afterwards[far-1]")
    assert afterwards.bad == ["failure", "error"]
    for name, note in (
        ("fails", "fails"),
        ("fails_and_is_lost_afterwards", "afterwards"),
        ("says_itself_what_a_lost_board_is", "itself"),
    ):
        assert runs_of(lab, note) == 1
        assert Case(lab, f"test_{name}[far-1]").tries == []
    for kind in ("timeout", "protocol"):
        case = Case(lab, f"test_may_be_about_its_command[far-1-{kind}]")
        assert (case.bad, case.tries, runs_of(lab, kind)) == (["failure"], [], 1)


def test_a_number_of_retries_that_is_none_is_refused(lab: pytest.Pytester) -> None:
    result = lab.runpytest_subprocess("--device-retries=-1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*found '-1', expected a whole number from 0 on*"])


# --- with pytest-xdist ------------------------------------------------------------------------


@pytest.fixture
def workers() -> None:
    if importlib.util.find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")


DYING = """
@pytest.mark.parametrize("way", ["exit", "crash"])
def test_dies(board, way):
    count(f"{board.name}-{way}")
    if board.name == "far-1":
        os._exit(3) if way == "exit" else os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.parametrize("number", range(3))
def test_any(board, number):
    count(f"{board.name}-any")
    assert number != 1

def test_is_the_last(board):
    count(f"{board.name}-last")
    os._exit(3)
"""


@pytest.mark.usefixtures("workers")
def test_a_crash_ends_one_test_and_boards_stay_with_their_worker(lab: pytest.Pytester) -> None:
    result = run(lab, DYING, "-n", "auto", "-v")
    result.assert_outcomes(passed=6, failed=6)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED test_own.py::test_dies?far-1-exit?*",
            "FAILED test_own.py::test_dies?far-1-crash?*",
            "FAILED test_own.py::test_is_the_last?far-1?*",
            "FAILED test_own.py::test_is_the_last?far-2?*",
        ]
    )
    # Not started again: it would take the next worker along.
    names = ("far-1-exit", "far-1-crash", "far-1-last", "far-2-last")
    assert [runs_of(lab, name) for name in names] == [1, 1, 1, 1]
    assert (runs_of(lab, "far-1-any"), runs_of(lab, "far-2-any")) == (3, 3)
    ran = re.findall(r"^\[(gw\d+)\].* \S+::test_any\[(far-\d)-\d\]", result.stdout.str(), re.M)
    assert len(ran) == 6
    assert len(set(ran)) == 2


STEADY = """
@pytest.mark.parametrize("number", range(3))
def test_any(board, number):
    assert number != 1
"""


@pytest.mark.usefixtures("workers")
def test_ids_are_the_same_with_workers_and_without(lab: pytest.Pytester) -> None:
    run(lab, STEADY, "-n", "auto").assert_outcomes(passed=4, failed=2)
    for board in (1, 2):
        assert Case(lab, f"test_any[far-{board}-1]").bad == ["failure"]
        assert Case(lab, f"test_any[far-{board}-0]").told["board"] == f"far-{board}"
    # What failed in a worker is found again without one, and the other way round.
    run(lab, STEADY, "--lf", "-k", "far-1 and test_own").assert_outcomes(failed=1)
    run(lab, STEADY, "--lf", "-n", "1").assert_outcomes(failed=2)


@pytest.mark.usefixtures("workers")
def test_the_board_of_an_id_is_the_first_that_it_names() -> None:
    from harness.farm.spreading import board_in

    boards = ["rk", "rk-1", "tiny"]
    assert board_in("t.py::test_stage[rk-1-tiny]", boards) == "rk-1"
    assert board_in("t.py::test_stage[rk-tiny]", boards) == "rk"
    assert board_in("t.py::test_own[x-rk-1]@rk-1", boards) == "rk-1"
    assert board_in("t.py::test_own[rk-2]", boards) == "rk"
    assert board_in("t.py::test_own[ark]", boards) is None
    assert board_in("t.py::test_own", boards) is None
