from __future__ import annotations

import json
from pathlib import Path

import pytest

from dashboards.files import MANIFEST, Folder
from harness.errors import HarnessError


def write(root: Path, files: dict[str, bytes]) -> Folder:
    folder = Folder.open(root)
    folder.expect(files)
    for name, content in files.items():
        folder.put(name, content)
    folder.finish()
    return folder


def test_a_file_that_did_not_change_is_not_touched(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write(root, {"a.html": b"1", "sub/b.html": b"2"})
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.html")}
    folder = write(root, {"a.html": b"1", "sub/b.html": b"3"})
    assert (folder.written, folder.unchanged) == (1, 1)
    assert (root / "a.html").stat().st_mtime_ns == before[root / "a.html"]
    assert (root / "sub/b.html").read_bytes() == b"3"


def test_everything_can_be_written_again(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write(root, {"a.html": b"1"})
    folder = Folder.open(root, incremental=False)
    folder.put("a.html", b"1")
    assert (folder.written, folder.unchanged) == (1, 0)


def test_stale_files_go_and_their_empty_folders_too(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write(root, {"a.html": b"1", "old/deep/b.html": b"2"})
    folder = write(root, {"a.html": b"1"})
    assert folder.removed == 1
    assert not (root / "old").exists()


def test_files_that_somebody_else_put_there_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write(root, {"a.html": b"1", "sub/b.html": b"2"})
    (root / "notes.txt").write_text("mine")
    (root / "sub/mine.txt").write_text("mine")
    write(root, {"a.html": b"1"})
    assert (root / "notes.txt").read_text() == "mine"
    assert (root / "sub/mine.txt").read_text() == "mine"


def test_a_folder_with_other_contents_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(HarnessError, match=r"thesis\.tex.*choose another folder"):
        Folder.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "site").write_text("")
    with pytest.raises(HarnessError, match="cannot write there"):
        Folder.open(tmp_path / "site")


@pytest.mark.parametrize(
    "name", ["../outside.txt", "/etc/hostname", "a/../../outside.txt", 7, None]
)
def test_a_forged_list_of_files_cannot_name_what_lies_outside(tmp_path: Path, name: object) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("keep")
    root = tmp_path / "site"
    root.mkdir()
    (root / MANIFEST).write_text(json.dumps({"files": [name]}))
    write(root, {"a.html": b"1"})
    assert outside.read_text() == "keep"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"files": "a"}'])
def test_a_broken_list_of_files_is_made_anew(tmp_path: Path, content: str) -> None:
    root = tmp_path / "site"
    root.mkdir()
    (root / MANIFEST).write_text(content)
    write(root, {"a.html": b"1"})
    assert json.loads((root / MANIFEST).read_text()) == {"files": ["a.html"]}


def test_a_build_that_is_cut_short_leaves_nothing_unknown_behind(tmp_path: Path) -> None:
    root = tmp_path / "site"
    folder = Folder.open(root)
    folder.expect(["a.html", "b.html"])
    folder.put("a.html", b"1")  # and then the process dies
    again = write(root, {"c.html": b"3"})
    assert again.removed == 1
    assert sorted(path.name for path in root.iterdir()) == [MANIFEST, "c.html"]


def test_no_temporary_file_stays_and_pages_are_readable_by_others(tmp_path: Path) -> None:
    root = tmp_path / "site"
    write(root, {"a.html": b"1"})
    assert sorted(path.name for path in root.iterdir()) == [MANIFEST, "a.html"]
    assert (root / "a.html").stat().st_mode & 0o044 == 0o044 & ~_umask()


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_page_cannot_be_put_outside_the_folder(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "site")
    with pytest.raises(ValueError, match="inside"):
        folder.put("../x.html", b"1")
