"""Which device tests are collected, and that collecting connects to nothing."""

from __future__ import annotations

import pytest

from harness.jobs import stages

# Looked up here: pytester forgets what a test imports, and numpy cannot be loaded twice.
STAGES = [stage.name for stage in stages()]

# Nothing answers there: a connection would take its whole time-out.
FARM = f"""
boards:
  far-1: {{host: 192.0.2.1, host_key: "SHA256:{"A" * 43}", tags: [nightly]}}
  far-2: {{host: 192.0.2.2, host_key: "SHA256:{"B" * 42 + "A"}"}}
"""

NO_NETWORK = """
import socket
import pytest

@pytest.fixture(autouse=True)
def _unused(): ...

def _refuse(*_):
    raise RuntimeError("collection connected")

socket.socket.connect = socket.create_connection = _refuse
"""

ORDINARY = "def test_ordinary():\n    pass\n"


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Another repository, with one ordinary test and no idea of boards."""
    monkeypatch.delenv("HARNESS_STRICT", raising=False)
    pytester.makeconftest(NO_NETWORK)
    pytester.makepyfile(test_ordinary=ORDINARY)
    return pytester


def ids(result: pytest.RunResult) -> list[str]:
    return [line.rsplit("::", 1)[1] for line in result.outlines if "::" in line]


def test_asking_for_device_tests_collects_every_board_and_stage_without_connecting(
    elsewhere: pytest.Pytester,
) -> None:
    elsewhere.makefile(".yaml", devices=FARM)
    result = elsewhere.runpytest_subprocess("-m", "device", "--collect-only", "-q")
    assert result.ret == 0
    expected = [f"test_stage[{b}-{s}]" for b in ("far-1", "far-2") for s in STAGES]
    assert ids(result) == expected


def test_boards_and_tags_narrow_what_is_collected(elsewhere: pytest.Pytester) -> None:
    elsewhere.makefile(".yaml", lab=FARM)
    for narrow in (["--boards", "far-1"], ["--tag", "nightly"]):
        result = elsewhere.runpytest_subprocess(
            "-m", "device", "--farm", "lab.yaml", "--collect-only", "-q", *narrow
        )
        assert ids(result) == [f"test_stage[far-1-{stage}]" for stage in STAGES]


def test_an_ordinary_run_has_no_device_tests(elsewhere: pytest.Pytester) -> None:
    elsewhere.makefile(".yaml", devices=FARM)
    for arguments in ([], ["-m", "not device"], ["."]):
        elsewhere.runpytest_subprocess(*arguments).assert_outcomes(passed=1)


def test_an_ordinary_run_does_not_read_the_farm_file(elsewhere: pytest.Pytester) -> None:
    elsewhere.makefile(".yaml", devices="boards: [broken")
    elsewhere.runpytest_subprocess().assert_outcomes(passed=1)


def test_an_ordinary_run_imports_nothing_heavy(elsewhere: pytest.Pytester) -> None:
    elsewhere.makepyfile(
        test_ordinary="""
        import sys

        def test_what_is_imported():
            heavy = {"numpy", "pandas", "paramiko", "pydantic", "sqlalchemy", "rich", "typer"}
            assert not heavy & set(sys.modules)
        """
    )
    elsewhere.runpytest_subprocess().assert_outcomes(passed=1)


def test_without_a_farm_file_the_device_tests_skip_with_the_reason(
    elsewhere: pytest.Pytester,
) -> None:
    result = elsewhere.runpytest_subprocess("-m", "device", "-rs")
    result.assert_outcomes(skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["SKIPPED*needs a devices.yaml in *"])


def test_without_a_farm_file_a_strict_run_fails(
    elsewhere: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_STRICT", "1")
    result = elsewhere.runpytest_subprocess("-m", "device")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*needs a devices.yaml in *"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--farm", "nowhere.yaml"], "*nowhere.yaml: no such file*"),
        (["--boards", "far-3"], "*no board 'far-3'*"),
        (["--tag", "weekly"], "*no tag 'weekly'*"),
        (["--stress-minutes", "-1"], "*stress_minutes: found -1*"),
    ],
)
def test_wrong_use_ends_the_session_with_one_message(
    elsewhere: pytest.Pytester, arguments: list[str], said: str
) -> None:
    elsewhere.makefile(".yaml", devices=FARM)
    result = elsewhere.runpytest_subprocess("-m", "device", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_a_mistake_in_the_farm_file_is_told_with_its_line(elsewhere: pytest.Pytester) -> None:
    elsewhere.makefile(".yaml", devices="boards:\n  one:\n    hots: 192.0.2.1\n")
    result = elsewhere.runpytest_subprocess("-m", "device")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *devices.yaml:3: unknown key 'hots'*"])


def test_own_device_tests_run_once_for_each_selected_board(elsewhere: pytest.Pytester) -> None:
    elsewhere.makefile(".yaml", devices=FARM)
    elsewhere.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.device
        def test_mine(board):
            pass
        """
    )
    result = elsewhere.runpytest_subprocess("-m", "device", "-k", "mine", "-v", "--boards", "far-2")
    result.stdout.fnmatch_lines(["*test_mine?far-2? PASSED*"])
    elsewhere.runpytest_subprocess("-k", "mine", "-v").assert_outcomes(deselected=2)
    # Naming the file asks for it too.
    named = elsewhere.runpytest_subprocess("test_own.py", "-v")
    named.assert_outcomes(passed=2)


def test_a_fixture_named_board_of_another_project_is_left_alone(
    elsewhere: pytest.Pytester,
) -> None:
    elsewhere.makepyfile(
        test_chess="""
        import pytest

        @pytest.fixture
        def board():
            return "8x8"

        @pytest.mark.device
        def test_chess(board):
            assert board == "8x8"

        def test_unmarked(board):
            assert board == "8x8"
        """
    )
    elsewhere.makefile(".yaml", devices=FARM)
    elsewhere.runpytest_subprocess("test_chess.py").assert_outcomes(passed=2)


def test_stages_come_before_tests_of_ones_own_which_hold_their_board(
    elsewhere: pytest.Pytester,
) -> None:
    elsewhere.makefile(".yaml", devices=FARM)
    elsewhere.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.device
        def test_mine(board, deployed):
            pass
        """
    )
    result = elsewhere.runpytest_subprocess(
        "-m", "device", "-k", "tiny or mine", "--collect-only", "-q"
    )
    assert ids(result) == [
        *("test_stage[far-1-tiny]", "test_stage[far-2-tiny]"),
        *("test_mine[far-1]", "test_mine[far-2]"),
    ]


def test_the_help_shows_files_with_an_equals_sign_and_why(elsewhere: pytest.Pytester) -> None:
    told = " ".join(elsewhere.runpytest_subprocess("--help").stdout.str().split())
    assert told.count("Write it with '=', or pytest takes FILE for a test") == 2
    assert told.count("Write it with '=', or pytest takes FOLDER for a test") == 1
