"""A skip for want of a tool must not pass for a green run where everything should be there."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import pytest

def test_lacks_a_tool():
    pytest.skip("needs an OpenSSH server")

def test_does_not_apply():
    pytest.skip("only on macOS")
"""


@pytest.fixture
def tree(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text())
    return pytester


def test_skips_for_want_of_something_fail_when_strict(
    tree: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.makepyfile(TESTS)
    monkeypatch.setenv("HARNESS_STRICT", "1")
    result = tree.runpytest_subprocess()
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*HARNESS_STRICT=1 and this was skipped: needs an OpenSSH*"])


def test_whole_modules_skipped_for_want_of_something_fail_when_strict(
    tree: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.makepyfile("import pytest\npytest.skip('needs a browser', allow_module_level=True)")
    monkeypatch.setenv("HARNESS_STRICT", "1")
    assert tree.runpytest_subprocess().ret != 0


def test_skips_stay_skips_otherwise(tree: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.makepyfile(TESTS)
    monkeypatch.delenv("HARNESS_STRICT", raising=False)
    tree.runpytest_subprocess().assert_outcomes(skipped=2)
