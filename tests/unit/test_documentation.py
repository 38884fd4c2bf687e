"""What the documents say about files, keys and commands is true."""

from __future__ import annotations

import dis
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.main import NOUNS, app
from harness.errors import BoardError
from harness.farm.results import ABANDONED, INTERRUPTED
from harness.inventory import load_farm
from harness.inventory.schema import Board, Budget, Engine, Virtual

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/devices.md"),
    *("docs/device-tests.md", "docs/triage.md", "docs/nights.md", "docs/profile.md"),
]
GROUPS = ("boards", "results", "dashboard", "bisect")  # commands that have commands
FINGERPRINT = "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "docs/devices.md"])
def test_the_example_of_a_farm_is_read_without_complaint(name: str, tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", text_of(name), re.DOTALL)
    assert found
    path = tmp_path / "devices.yaml"
    path.write_text(found[1].replace("SHA256:…", FINGERPRINT))
    assert "rk3588-01" in load_farm(path).boards


@pytest.mark.parametrize("model", [Board, Budget, Engine, Virtual])
def test_every_key_of_the_farm_file_is_explained(
    model: type[Board | Budget | Engine | Virtual],
) -> None:
    text = text_of("docs/devices.md")
    missing = [key for key in model.model_fields if f"`{key}`" not in text and key != "name"]
    assert missing == []


def test_every_kind_of_trouble_is_explained() -> None:
    text = text_of("README.md")
    kinds = [*BoardError.KINDS, INTERRUPTED, ABANDONED, "host", "internal"]
    assert [kind for kind in kinds if f"`{kind}`" not in text] == []


def test_the_example_of_a_pytest_test_imports_what_it_uses() -> None:
    found = re.search(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(compile(found[1], "README.md", "exec"), names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    used = {item.argval for item in dis.get_instructions(test) if item.opname == "LOAD_GLOBAL"}
    assert used - names.keys() == set()


@pytest.mark.parametrize("name", ["README.md", "docs/devices.md"])
def test_every_command_that_is_shown_exists_with_its_options(name: str) -> None:
    runner, shown = CliRunner(), set()
    for line in re.findall(r"\bharness ([a-z]+(?: [a-z]+)?[^`\n#]*)", text_of(name)):
        words = line.split()
        if words[0] in NOUNS:
            verb = [word for word in words[1:2] if words[0] in GROUPS]
            shown.add((words[0], *verb, *(word for word in words if word.startswith("--"))))
    assert shown
    for noun, *rest in sorted(shown):
        verbs = [word for word in rest if not word.startswith("--")]
        told = runner.invoke(app, [noun, *verbs, "--help"])
        assert told.exit_code == 0, (noun, verbs, told.output)
        assert [word for word in rest if word.startswith("--") and word not in told.stdout] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_is_named_exists(name: str) -> None:
    text = text_of(name)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`((?:engine|harness|dashboards|tests|docs|requirements)/[^`\s*]*)`", text)
    base = (ROOT / name).parent
    missing = [link for link in links if not (base / link).exists()]
    missing += [path for path in paths if "NAME" not in path and not (ROOT / path).exists()]
    assert missing == []


def test_what_the_fixtures_of_device_tests_hold_is_there() -> None:
    from harness.connect import BoardSession
    from harness.farm.decoding import DecodeSession, Turn
    from harness.farm.deployed import Deployed

    text = text_of("docs/device-tests.md")
    _, deployed, decoding, _ = re.split(
        r"\*\*`deployed`\*\*|\*\*`decode_session`\*\*|## What an", text
    )
    named = set(re.findall(r"`(\w+)[`(,]", deployed))
    for name in ("session", "python", "facts", "package", "engine"):
        assert name in named
        assert hasattr(Deployed, name)
    for name in ("push_file", "push_bytes", "pull_file", "read_from"):
        assert name in named
        assert hasattr(BoardSession, name)
    for name in ("generate", "chat", "run", "encode"):
        assert f"`{name}(" in decoding
        assert hasattr(DecodeSession, name)
    for name in ("tokens", "text", "finish", "times_s"):
        assert f"`{name}`" in decoding
        assert name in Turn.__dataclass_fields__
