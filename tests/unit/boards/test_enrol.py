"""A host key is written into devices.yaml as a person would: nothing else in the file moves."""

from __future__ import annotations

import difflib
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.boards.enrol import pin_host_key, with_host_key
from harness.errors import HarnessError
from harness.inventory import load_farm

OLD = "SHA256:" + "A" * 42 + "E"
NEW = "SHA256:" + "b/+" * 14 + "Q"

BLOCK = """\
# The farm.

defaults: {user: root}      # for all

boards:
  rk-01:
    host: 192.0.2.11        # the one on the left
    tags: [rk3588,   npu]   # odd spacing stays

  # broken since May
  pi-01:
    tags: [pi4]
    host: "192.0.2.12"
  flow-01: {host: 192.0.2.13, tags: [x]}   # one line
  virt: {virtual: {}}
"""


def changed_lines(before: str, after: str) -> list[str]:
    diff = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in diff if line[:2] in ("+ ", "- ")]


def pinned(text: str, board: str, folder: Path) -> str:
    path = folder / "devices.yaml"
    path.write_bytes(text.encode())
    assert pin_host_key(path, board, NEW)
    assert load_farm(path).boards[board].host_key == NEW
    return path.read_bytes().decode()


@pytest.mark.parametrize(
    ("board", "lines"),
    [
        ("rk-01", [f"+     host_key: {NEW}"]),
        ("pi-01", [f"+     host_key: {NEW}"]),
        (
            "flow-01",
            [
                "-   flow-01: {host: 192.0.2.13, tags: [x]}   # one line",
                f"+   flow-01: {{host: 192.0.2.13, host_key: {NEW}, tags: [x]}}   # one line",
            ],
        ),
    ],
)
def test_a_new_key_is_one_line_or_item_after_the_address(
    board: str, lines: list[str], tmp_path: Path
) -> None:
    after = pinned(BLOCK, board, tmp_path)
    assert changed_lines(BLOCK, after) == lines
    where = after.splitlines().index(lines[-1][2:])
    assert "host: " in after.splitlines()[where - (board != "flow-01")]


def test_a_key_that_stands_there_is_replaced_and_its_comment_stays(tmp_path: Path) -> None:
    before = BLOCK.replace(
        "    tags: [rk3588,", f"    host_key: '{OLD}'   # of the first image\n    tags: [rk3588,"
    )
    after = pinned(before, "rk-01", tmp_path)
    assert changed_lines(before, after) == [
        f"-     host_key: '{OLD}'   # of the first image",
        f"+     host_key: {NEW}   # of the first image",
    ]


def test_the_same_key_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(BLOCK)
    assert pin_host_key(path, "rk-01", NEW)
    before = path.stat()
    assert not pin_host_key(path, "rk-01", NEW)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_windows_line_ends_a_byte_order_mark_and_a_missing_last_line_end_stay(
    tmp_path: Path,
) -> None:
    path = tmp_path / "devices.yaml"
    text = "\ufeffboards:\r\n  a:\r\n    host: h  # c"
    path.write_bytes(text.encode())
    assert pin_host_key(path, "a", NEW)
    assert path.read_bytes().decode() == f"{text}\r\n    host_key: {NEW}"
    assert load_farm(path).boards["a"].host_key == NEW


def test_a_board_whose_other_values_are_blocks_is_written_too(tmp_path: Path) -> None:
    text = (
        "boards:\n  a:\n    tags:\n      - x\n      - y\n    host: h\n"
        "    budget:\n      max_kl: 0.1\n  b:\n    host: i\n"
    )
    after = pinned(text, "a", tmp_path)
    assert changed_lines(text, after) == [f"+     host_key: {NEW}"]


def test_other_boards_that_jump_through_it_do_not_count_as_changed(tmp_path: Path) -> None:
    text = "boards:\n  gate: {host: g}\n  inner:\n    host: i\n    jump: gate\n"
    pinned(text, "gate", tmp_path)
    jump = load_farm(tmp_path / "devices.yaml").boards["inner"].jump
    assert jump is not None
    assert jump.host_key == NEW


def test_a_key_of_the_defaults_or_of_a_jump_host_is_not_mistaken_for_the_boards(
    tmp_path: Path,
) -> None:
    text = f"boards:\n  a:\n    jump: {{host: g, host_key: '{OLD}'}}\n    host: h\n"
    after = pinned(text, "a", tmp_path)
    assert f"host_key: '{OLD}'" in after


def test_permissions_and_a_link_to_the_file_stay(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text(BLOCK)
    real.chmod(0o640)
    link = tmp_path / "devices.yaml"
    link.symlink_to(real)
    assert pin_host_key(link, "rk-01", NEW)
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert NEW in real.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["devices.yaml", "real.yaml"]


@pytest.mark.parametrize(
    ("board", "message"), [("virt", "it is virtual"), ("rk-02", "no board 'rk-02'.*rk-01")]
)
def test_virtual_and_unknown_boards_are_refused_and_the_file_stays(
    board: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(BLOCK)
    with pytest.raises(HarnessError, match=message):
        pin_host_key(path, board, NEW)
    assert path.read_text() == BLOCK
    assert [item.name for item in tmp_path.iterdir()] == ["devices.yaml"]


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
COMMENTS = st.sampled_from(["", "  # a comment", "   # host_key: SHA256:none", " # {[]}: &*"])


@st.composite
def farms(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A farm's text in mixed layouts, and the names of its boards."""
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    lines = [f"boards:{draw(COMMENTS)}"]
    indent = draw(st.sampled_from(["  ", " ", "      "]))
    for name in names:
        inner = indent + draw(st.sampled_from(["  ", " ", "    "]))
        host = draw(st.sampled_from(["h", "'h'", '"192.0.2.1"', "h:2222"]))
        key = draw(st.sampled_from(["", OLD, f"'{OLD}'", f'"{OLD}"']))
        if draw(st.booleans()):
            if host == "h:2222":
                host = "'h:2222'"
            items = [f"host: {host}", "tags: [a,  b]"] + ([f"host_key: {key}"] if key else [])
            body = ", ".join(draw(st.permutations(items)))
            lines.append(f"{indent}{name}: {{{body}}}{draw(COMMENTS)}")
        else:
            lines.append(f"{indent}{name}:{draw(COMMENTS)}")
            items = [f"host: {host}", "tags: [a,  b]"] + ([f"host_key: {key}"] if key else [])
            lines += [f"{inner}{item}{draw(COMMENTS)}" for item in draw(st.permutations(items))]
        if draw(st.booleans()):
            lines.append(draw(st.sampled_from(["", "# between", f"{inner}# inside"])))
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n\n# end"])), names


@given(farm=farms(), data=st.data())
def test_in_any_layout_only_the_key_changes(
    farm: tuple[str, list[str]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text, names = farm
    board = data.draw(st.sampled_from(names))
    path = tmp_path_factory.mktemp("farm") / "devices.yaml"
    path.write_text(text)
    before = load_farm(path).boards
    path.write_text(with_host_key(text, board, NEW))
    after = load_farm(path).boards
    assert after[board].host_key == NEW
    for name in names:
        kept = before[name].model_copy(update={"host_key": after[name].host_key})
        assert after[name] == kept
        assert name == board or after[name].host_key == before[name].host_key
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert [
        line.partition("#")[2] for line in path.read_text().splitlines() if "#" in line
    ] == comments
