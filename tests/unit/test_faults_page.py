"""docs/faults.md names tests that exist, and says what is true of sudo."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "| tests |" not in line
]


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_fault_has_a_rule_and_tests_that_exist(row: list[str]) -> None:
    symptom, rule, tests = row
    assert symptom and rule
    named = re.findall(r"`(tests/[^`:]+)::([^`]+)`", tests)
    assert named
    assert len(named) == tests.count("::")
    assert [(path, name) for path, name in named if name not in functions_in(ROOT / path)] == []


def test_the_page_has_all_its_tables() -> None:
    assert len(ROWS) > 40


def test_nothing_is_done_with_sudo() -> None:
    """The page says so: a board's commands need no right that its user has not."""
    files = [
        *ROOT.glob("harness/**/*.py"),
        *ROOT.glob("harness/**/*.sh"),
        *ROOT.glob("engine/**/*.py"),
    ]
    users = [str(path) for path in files if re.search(r"\bsudo\b", path.read_text("utf-8"))]
    assert len(files) > 100
    assert users == []
