"""The engine runs on boards with Python 3.9, numpy and psutil, and knows nothing of the host."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine

ROOT = Path(engine.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ON_EVERY_BOARD = set(sys.stdlib_module_names) | {"engine", "numpy", "psutil"}
# Host-only libraries that the engine may use where they are, inside a function.
WHERE_THEY_ARE = {"tokenizers", "gguf", "jinja2"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path), feature_version=(3, 9))


def imports(node: ast.AST, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """(top-level module, whether the import waits for a call)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.split(".")[0], in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module.split(".")[0], in_function
        inner = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from imports(child, inner)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_parses_on_python_3_9_and_imports_what_every_board_has(path: Path) -> None:
    for module, waits in imports(parse(path)):
        allowed = ON_EVERY_BOARD | (WHERE_THEY_ARE if waits else set())
        assert module in allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_annotations_are_not_evaluated(path: Path) -> None:
    """`X | None` in an annotation needs the future import on Python 3.9."""
    tree = parse(path)
    if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(tree)):
        return
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert any(node.module == "__future__" for node in futures)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_newer_than_python_3_9_is_called(path: Path) -> None:
    newer = {"strict", "slots", "kw_only"}  # of zip() and dataclass()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "zip" or name.endswith("dataclass"):
                assert not newer & {keyword.arg for keyword in node.keywords}, ast.unparse(node)
